"""Rules between the settings of a topology, which types and bounds cannot express.

Open validate.py first. Each problem names the key that the user would change.
"""
