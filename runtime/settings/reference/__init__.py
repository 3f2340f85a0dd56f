"""docs/settings.md: every setting with its allowed values, default and description, generated from the schema.

Open page.py first; meanings.py reads the descriptions from the comments of the fields.
"""
