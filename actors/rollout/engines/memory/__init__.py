"""Colocation: releasing and resuming the GPU memory that engines share with the trainer.

Start with follower.py, which follows the phases; share.py handles one engine's memory.
"""
