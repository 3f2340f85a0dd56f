"""The filter: judges completed prompt groups and keeps no state.

Open actor.py first, filters.py for the built-in ones.
"""
