"""The node agent: starts the processes of one node, follows the run and ends everything together.

Open start.py first, then node.py.
"""
