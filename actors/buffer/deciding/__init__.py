"""The buffer's decisions, computed from the ledger alone. Pure.

Open decide.py first.
"""
