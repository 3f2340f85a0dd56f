"""The buffer: keeps the ledger, issues, halts and batches prompt groups, and publishes tasks.

Open deciding/decide.py for its decisions, actor.py for their timing.
"""
