"""One prompt group from its task to its end.

Open run.py first.
"""
