"""Requests to the engines: sent, sent again when lost, interrupted.

Open sending.py.
"""
