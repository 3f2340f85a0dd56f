"""Pre-start checks of this machine, for a valid topology.

Open check.py first.
"""
