"""Weights in files without torch: tensors mapped from the disk, and what changed between versions.

Open delta.py.
"""
