"""Endless tasks of reasoning-gym: a data function and its grader, which ask a process of another interpreter.

Open tasks.py first.
"""
