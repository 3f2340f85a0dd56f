"""The tiny engine's model: forward pass, KV slots, sampling, tokenizer, weight updates.

Open forward.py first.
"""
