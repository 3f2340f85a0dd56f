"""The commands. `physarum.py` runs one of them; in a checkout, the links to `physarum` set up .venv first."""
