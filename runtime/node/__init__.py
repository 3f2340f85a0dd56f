"""The node daemon: starts the processes of one node, follows the run, and stops everything together.

Open start.py first, then planning.py and daemon.py.
"""
