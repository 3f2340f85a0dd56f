"""Graders: the built-in ones, and the call of one, built-in or a user's.

Open calling.py first.
"""
