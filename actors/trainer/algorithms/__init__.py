"""Advantages, losses, corrections, KL estimators, reductions and schedules: pure functions that name their source.

Open loss_inputs.py first, then policy_losses.py.
"""
