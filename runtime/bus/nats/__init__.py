"""The bus's NATS backend: the only package that imports the NATS client and uses the server's API.

Start reading at connection.py, then store.py and pull.py.
"""
