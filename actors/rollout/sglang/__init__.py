"""Client for SGLang's HTTP API: engines and router.

Open client.py first.
"""
