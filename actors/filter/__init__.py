"""The filter: judges completed prompt groups; stateless.

Open actor.py first, filters.py for the built-in ones.
"""
