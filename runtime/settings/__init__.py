"""What a user writes: topology and recipe, read from TOML, checked, and what follows from them.

Open topology.py and recipe.py for the keys, load.py for how a file becomes them.
"""
