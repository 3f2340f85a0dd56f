"""The conversation API of user-defined generate functions.

Open conversation.py first.
"""
