"""Layers that replace those of TransformerEngine or Apex, or that Megatron-core lacks.

They run on the CPU and on a GPU alike.
"""
