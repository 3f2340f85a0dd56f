"""Generate and rollout functions that were written for slime, found by its name alone.

Open rollout.py first: it calls rollout functions; generate.py calls generate functions.
"""
