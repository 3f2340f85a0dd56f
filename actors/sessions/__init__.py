"""The listener for agents: an HTTP server of its own process that clients of OpenAI and Anthropic speak to.

Open dialects/reading.py first: a dialect reads a request and writes its answer. What goes on to the rollout actor is in
runtime/sessions/.
"""
