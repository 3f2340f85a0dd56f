"""What engines hold while trainer and engines take turns with the same memory.

Start with follower.py, which follows the phases; tenure.py is one engine's part.
"""
