"""NATS as the bus uses it: the only room that imports its client or knows its API's words.

Open connection.py first, then store.py and pull.py.
"""
