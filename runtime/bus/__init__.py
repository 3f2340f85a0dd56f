"""The typed bus: messages over NATS JetStream, calls, the KV bucket and the roster.

Start reading at bus.py. Only nats/ imports the NATS client.
"""
