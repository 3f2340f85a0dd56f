"""The actors: one folder per actor; registry.py lists them.

Actors never import each other; they share messages.
"""
