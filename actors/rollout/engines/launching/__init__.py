"""How a server of SGLang is started: its arguments, the run's key, and its first weights from a peer.

launch.py becomes the server, in the interpreter that has SGLang; so it and peer_weights.py need nothing of ours.
"""
