"""The trainer's use of Megatron-core: imports, parallel groups, model, optimizer and checkpoints.

Open imports.py and rank_model.py first.
"""
