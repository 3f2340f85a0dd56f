"""Starting an SGLang server: its arguments, the run's API key, and its first weights from a peer engine.

launch.py runs in the SGLang interpreter and becomes the server. So launch.py and peer_weights.py import nothing else of
this project.
"""
