"""docs/settings.md: every setting with what it allows, its default and what it means, made from the schema.

Open page.py first; meanings.py reads what stands beside a field in its source.
"""
