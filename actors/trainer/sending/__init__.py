"""Sending of weights from the trainer to engines, and prediction of the engines' weight checksums.

Open cast.py for the dtypes and quantization.
"""
