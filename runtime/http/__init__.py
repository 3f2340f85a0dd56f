"""HTTP servers of a run: limits and secrets of all of them, and the room from which nodes read what the run announced.

Open connections.py first, then room.py.
"""
