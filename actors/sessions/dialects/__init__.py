"""Dialects of clients, pure: a request's bytes to a TurnRequest, an answer to its bytes. Open reading.py first."""
