"""Sessions of agents: a tree of messages whose prompts are the recorded tokens; no sampled token is rendered again.

Open tree.py first.
"""
