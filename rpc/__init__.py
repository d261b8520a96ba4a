"""The control channel: protocol messages between the processes of one cluster."""
