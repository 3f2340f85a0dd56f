"""Reads settings into typed tables: files with includes, overrides, checks against the schema.

Open toml.py first. schema.py finds problems; config.py is the base of every table.
"""
