"""Graders: the built-in ones, and how graders are called.

Open calling.py first.
"""
