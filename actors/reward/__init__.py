"""The reward actor: grades samples in processes that may hang, crash and be killed.

Open actor.py first, then pool.py.
"""
