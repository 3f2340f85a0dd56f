"""What agents and environments ask of the model over HTTP, in one form for all dialects; open turns.py first."""
