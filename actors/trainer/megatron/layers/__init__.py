"""Parts of a model that are ours where Megatron-core would take TransformerEngine's or Apex's, or has none.

They run on the CPU and on a GPU alike.
"""
