"""The embedded engine's torch thread, and who runs when on it.

Open scheduler.py first.
"""
