"""Authenticated frames over TCP, used by every socket between two processes of a cluster.

session: handshake, seals and frame layout, without a socket
streams: a connection on an asyncio event loop
channel: a blocking connection, with a deadline for every message
keepalive: socket options that notice a dead host
"""
