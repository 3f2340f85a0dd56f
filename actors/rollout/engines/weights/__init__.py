"""Weight updates of engines.

Open updater.py first, then receiving.py.
"""
