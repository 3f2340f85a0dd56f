"""The embedded engine's HTTP server: SGLang's endpoints, as far as it has them.

Open server.py first.
"""
