"""Hugging Face models: configuration, weight names, sharding and files.

Open names.py first.
"""
