"""Start scripts of slime, turned into a recipe and a topology.

Open convert.py first: script.py reads the script, written.py writes the files.
"""
