"""Rules across the fields of a topology: what types and bounds cannot say.

Open validate.py first. Each rule names the keys a person would change.
"""
