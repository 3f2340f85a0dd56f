"""Megatron-core's own settings by name: which there are, which are keys here, and why the others are not."""
