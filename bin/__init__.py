"""The commands. `start_topology.py` starts a run; in a checkout, the shell scripts beside it set up .venv first."""
