"""Prompt sources: data files, users' functions, demonstrations; rendered and tokenized.

Open source.py first.
"""
