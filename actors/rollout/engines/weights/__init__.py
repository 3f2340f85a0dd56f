"""Weight updates of engines; one file per transport.

Open updater.py first, then receiving.py.
"""
