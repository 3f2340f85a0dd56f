"""Rollout without engines: samples that exist already, demonstrations or a dump's.

Open actor.py.
"""
