"""The engines of a rollout actor: who is up, who holds which weights, who is behind the router.

Open fleet.py first.
"""
