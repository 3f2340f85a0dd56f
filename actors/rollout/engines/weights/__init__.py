"""How an engine takes new weights; one file a transport.

Open updater.py, then receiving.py.
"""
