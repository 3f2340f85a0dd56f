"""The embedded engine's model: configuration, forward pass, key-value slots, sampling.

Open forward.py first.
"""
