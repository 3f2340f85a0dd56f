"""Weight updates of engines.

Open verifier.py first, whose `update` has the steps of one; then updater.py and receiving.py.
"""
