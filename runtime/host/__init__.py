"""What an actor is, and the process that hosts one or several.

Open actor.py first.
"""
