"""Names of settings in verl, prime-rl and NeMo-RL, for hints and for the page of those who come from there."""
