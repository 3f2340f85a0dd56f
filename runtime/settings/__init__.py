"""Settings: topology and recipe, read from TOML and checked, with everything derived from them.

Open tables/ for the keys, derived.py and topology.py for what follows from them, load.py for how a file is read.
"""
