"""From the run's log to micro-batches. Uses NumPy, not torch.

Open feed.py first.
"""
