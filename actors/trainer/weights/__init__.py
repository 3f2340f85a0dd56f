"""Weights on their way out of the trainer: to files, to deltas, and to engines in weight syncs.

Open export.py first: one export passes buckets to one sink per transport. syncs.py has rank 0's protocol.
"""
