"""From text to typed tables: files with their includes, overrides, and what a schema says of them.

Open toml.py first; schema.py finds what is wrong, config.py is the base of every table.
"""
