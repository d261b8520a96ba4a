"""The control channel: protocol messages between the processes of one cluster.

methods: every call, declared once; the frames that carry calls
server: serves calls and streams
client: makes them, over one connection per peer
"""
