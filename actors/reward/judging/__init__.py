"""Judges: language models that score samples, in engine pools of the run or behind a URL.

Start with judges.py.
"""
