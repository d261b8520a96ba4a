"""The public gRPC contract: `*.proto` and the code generated from it. See `scripts/proto.py`."""
