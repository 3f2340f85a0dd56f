"""What a user's generate function works with.

Open conversation.py.
"""
