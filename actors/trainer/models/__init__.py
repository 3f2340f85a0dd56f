"""Hugging Face models: their configuration, and their weights' names, cuts and files.

Open names.py first.
"""
