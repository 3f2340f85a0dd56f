"""How messages are carried: the bus, settings, the ledger's fold, and the agent that runs a node's processes.

Open bus/bus.py for the typed bus, agent/start.py for how a run begins. Rooms import downwards only.
"""
