"""The rollout actor: pulls tasks, drives its engines, publishes samples, asks for their scores.

Open actor.py first, then groups/run.py.
"""
