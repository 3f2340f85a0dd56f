"""User functions inside the trainer: loaded by name, tried on two samples at the start, checked at every call.

Open `functions.py` first; `dry_run.py` tries the functions.
"""
