"""Claims on a run directory (a lock) and on a node (a key on the bus).

Open claim.py first.
"""
