"""The ledger: the state of every prompt group, folded from the log by any reader of it.

Start reading at fold.py; state.py defines the folded state.
"""
