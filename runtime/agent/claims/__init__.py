"""Who may run what: the run directory and its lock, the claim on a node.

Open claim.py first.
"""
