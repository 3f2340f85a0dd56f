"""One train step: from a batch of scored samples to optimizer steps and metrics.

Open train_step.py.
"""
