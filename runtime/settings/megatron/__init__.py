"""Megatron-core's own settings by name: the fields that are keys here, and why other fields are not."""
