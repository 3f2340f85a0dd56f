"""Storage of the log and the streams: fill levels, trimming, sample dumps.

Open pressure.py and trimming.py first.
"""
