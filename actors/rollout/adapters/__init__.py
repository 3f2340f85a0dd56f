"""Programs that play environments, each in an interpreter of its own: the standard library and one package.

Open `playing.py` first: what they share.
"""
