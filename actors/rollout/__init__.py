"""The rollout actor: pulls tasks, drives the engines, publishes samples and requests their scores.

Open actor.py first, then samples/group.py.
"""
