"""The gRPC front end: baton.v1, health and reflection.

server: the listener, keys and deserialising
inference, admin: the two services
requests: messages to typed requests
answers: output to messages
call: metadata and trace of a call, its error status
"""
