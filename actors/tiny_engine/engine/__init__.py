"""The tiny engine's torch thread and scheduler.

Open scheduler.py first.
"""
