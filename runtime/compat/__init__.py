"""What other projects call things: an adapter in each package. Nothing imports this one; without it all else works.

Open runtime/settings/reading/hints.py first, which finds the adapters.
"""
