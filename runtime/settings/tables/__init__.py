"""The tables of a topology and its recipe, a module per subject: their keys, what is allowed, what each key means.

Open algorithm.py or rollout.py. The reference page docs/reference/settings.md is made from the comments.
"""
