"""slime's flags: the equivalent of each, the page generated from them, and hints for unknown keys.

Open flags.toml first.
"""
