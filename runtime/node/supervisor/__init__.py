"""Supervision of child processes: start, restart, stop, and cleanup.

Open supervisor.py first.
"""
