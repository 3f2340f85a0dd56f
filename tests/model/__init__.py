"""Explicit states of the ledger: every order of events of small runs, with deaths; open world.py first."""
