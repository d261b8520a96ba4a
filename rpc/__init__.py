"""The control channel: protocol messages between the processes of one cluster.

`methods` declares every call, `service` serves and calls them, `link` is the caller's end of a
connection, `frames` what both ends share.
"""
