"""The listener for agents: an HTTP server of its own process that clients of OpenAI and Anthropic speak to.

Open listener.py first; dialects/ reads requests and writes answers. What goes on to the rollout actor is in
runtime/sessions/.
"""
