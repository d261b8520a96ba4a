"""The control channel: protocol messages between the processes of one cluster.

methods: every call, declared once
frames: kinds of frames, and the payload of a call
server: serves calls and streams
client: makes them, over one connection per peer
"""
