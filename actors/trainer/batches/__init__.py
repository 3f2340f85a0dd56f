"""From the run's log to micro-batches. Numpy, no torch.

Open feed.py first.
"""
