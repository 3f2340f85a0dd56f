"""Trackers: each process copies the rows of metrics.jsonl to one tracker. Open __main__.py first.

It runs in the tracker's own environment: standard library and the tracker's package only.
"""
