"""Simulation of the whole system, deterministic by seed: the actors' own code on a simulated bus in virtual time.

Open world.py first. `python -m tests.simulate` plays runs by seed.
"""
