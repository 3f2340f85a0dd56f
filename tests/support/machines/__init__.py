"""Machines for tests: namespaces of one kernel, joined by a switch in user space.

Open lan.py first: `machines(...)` makes them. Nothing here reaches a network outside the test.
"""
