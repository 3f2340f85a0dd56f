"""What the log and the streams keep: how full they are, what is trimmed, what is dumped.

Open pressure.py and trimming.py first.
"""
