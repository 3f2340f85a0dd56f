"""The actor base class, and the process that hosts actors.

Open actor.py first.
"""
