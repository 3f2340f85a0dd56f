"""Functions of users: which kinds there are, how one is found and checked, and the processes that call them.

Open table.py first: a setting declares its kind, and all else follows from that.
"""
