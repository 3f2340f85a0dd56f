"""Engine pools whose model does not change: calls to them, and the columns that they compute of samples.

Start with frozen.py.
"""
