"""Builders with defaults: a test names what it is about and nothing else.
Open events.py for the log, samples.py for tokens, topology.py for settings, model.py for checkpoints.
"""
