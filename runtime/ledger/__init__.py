"""The ledger: what the log says about every prompt group, folded by whoever follows it.

Open fold.py first; state.py is what it folds to.
"""
