"""Settings: topology and recipe, read from TOML and checked, with everything derived from them.

Open tables/ and topology.py for the keys, derived.py for what follows from them, load.py for how a file is read.
"""
