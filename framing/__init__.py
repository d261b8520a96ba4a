"""Authenticated frames over TCP, used by every socket between two processes of a cluster.

session: handshake, seals and frame layout; a connection on an asyncio event loop; keepalive
ports: a free port of a range
channel: a blocking connection, with a deadline for every message
"""
