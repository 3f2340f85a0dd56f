"""Weights on their way from the trainer to engines: in which form they go, and what an engine says of them afterwards.

Open cast.py for the form.
"""
