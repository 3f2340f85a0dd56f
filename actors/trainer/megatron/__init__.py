"""Megatron-core as the trainer uses it: its imports, groups, model, optimizer and checkpoints.

Open imports.py and rank_model.py first.
"""
