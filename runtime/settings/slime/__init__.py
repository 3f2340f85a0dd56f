"""Names of slime: its flags with what became of each, the page made of them, and hints for keys that do not exist.

Open flags.toml first.
"""
