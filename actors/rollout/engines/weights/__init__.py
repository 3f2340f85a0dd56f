"""How an engine takes new weights; one file a transport.

Open disk.py.
"""
