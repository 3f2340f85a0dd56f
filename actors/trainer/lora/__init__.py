"""LoRA: which layers have adapters, adapters on Megatron's layers, and adapters in peft's files and in checkpoints.

Open adapters.py first: the rest of the trainer calls its functions and does not know what an adapter is.
"""
