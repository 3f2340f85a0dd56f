"""The engines of a rollout actor: their state, their weights, and their registration at the router.

Open status.py first: what an engine is, and its next step. Then fleet.py, with the loop of
each engine, and serving.py, which requests ask.
"""
