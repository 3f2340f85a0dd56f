"""Requests to the engines: sending, resending and interrupting.

Open sending.py first.
"""
