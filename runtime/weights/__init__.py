"""Weight files without torch: memory-mapped tensors, and deltas between versions.

Open delta.py.
"""
