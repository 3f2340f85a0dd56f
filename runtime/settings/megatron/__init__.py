"""Megatron-core's own settings by name: which are keys here, and why the others are not."""
