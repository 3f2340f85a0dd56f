"""SGLang's HTTP API as a rollout actor uses it.

Open client.py first.
"""
