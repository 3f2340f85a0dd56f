"""Claims on a run directory (a lock) and on a node (a key on the bus), and the user's notes of starts.

Open claim.py first.
"""
