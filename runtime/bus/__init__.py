"""The typed bus: messages over NATS JetStream, calls, the KV bucket and the roster.

Open bus.py first; what knows nats is in nats/.
"""
