"""Trainer: trains batches from the log and publishes weights for the engines.

Open leader.py first; the train step itself is in step/train_step.py.
"""
