"""The buffer: keeps the ledger, decides what is issued, halted and batched, and puts the work.

Open deciding/decide.py for what it decides, actor.py for when.
"""
