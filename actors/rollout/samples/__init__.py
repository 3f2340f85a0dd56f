"""One prompt group from its task to its end: samples, their tokens, scores and partial results.

Open group.py first, then buffer.py.
"""
