"""What the buffer does next, from the ledger alone. Pure.

Open decide.py first.
"""
