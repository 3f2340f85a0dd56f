"""What a valid topology still needs from this machine before it is started here.

Open check.py first.
"""
