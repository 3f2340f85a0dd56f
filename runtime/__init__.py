"""Infrastructure of a run: the bus, settings, the ledger's fold, and the node daemon that runs a node's processes.

Start reading at bus/bus.py (the typed bus) and node/start.py (the start of a run). Packages import downwards only.
"""
