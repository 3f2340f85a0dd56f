"""Model configs and weight files without torch: checksums, memory-mapped tensors, deltas between versions.

Open config.py for configs, delta.py for weights.
"""
