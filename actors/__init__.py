"""Who speaks on the bus: one folder an actor; registry.py says which there are.

Actors never import each other, they share messages.
"""
