"""docs/reference/settings.md: every setting with its allowed values, default and description, from the schema.

Open page.py: it reads the descriptions from the comments of the fields.
"""
