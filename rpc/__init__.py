"""The control channel: protocol messages over grpc.aio, between the processes of one cluster."""
