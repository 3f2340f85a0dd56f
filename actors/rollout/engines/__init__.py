"""The engines of a rollout actor: their state, their weights, and their registration at the router.

Open fleet.py first.
"""
