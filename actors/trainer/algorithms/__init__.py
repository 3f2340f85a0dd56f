"""Advantages, losses, reductions and schedules: pure functions, each with its source.

Open losses.py first.
"""
