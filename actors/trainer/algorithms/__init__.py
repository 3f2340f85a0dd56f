"""Losses, advantages, log-probs and schedules. Every function is pure and names its source.

Open losses.py first.
"""
