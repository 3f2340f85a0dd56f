"""The tiny engine's HTTP server: a subset of SGLang's endpoints.

Open server.py first.
"""
