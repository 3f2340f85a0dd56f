"""Settings: topology and recipe, read from TOML and checked, with everything derived from them.

Open topology.py and recipe.py for the keys, load.py for how a file is read.
"""
