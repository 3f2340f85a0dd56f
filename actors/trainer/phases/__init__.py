"""Colocation: the trainer and the engines take turns in the same memory.

Start with turns.py, which runs the phases. states.py defines their order and the recovery from a crash in each.
"""
