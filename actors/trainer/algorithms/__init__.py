"""Advantages, losses, reductions and schedules. Every function is pure and names its source.

Open losses.py first.
"""
