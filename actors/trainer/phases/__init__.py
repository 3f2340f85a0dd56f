"""Colocation: the trainer and the engines use the same memory alternately.

Start with colocation.py, which runs the phases. states.py defines their order and the recovery from a crash in each.
"""
