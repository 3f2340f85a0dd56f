"""SGLang's HTTP API, server arguments and start: everything that depends on SGLang's behaviour.

Open client.py first.

launch.py runs in the SGLang interpreter and becomes the server. So launch.py and peer_weights.py import nothing else
of this project.
"""
