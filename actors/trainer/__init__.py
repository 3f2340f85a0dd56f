"""The trainer: batches from the log in, weights for the engines out.

Open leader.py first; the train step itself is step/train_step.py.
"""
