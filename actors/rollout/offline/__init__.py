"""Offline rollout: answers tasks from demonstrations or a dump, without engines.

Open actor.py first.
"""
