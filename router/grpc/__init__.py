"""The gRPC front end: baton.v1, health and reflection.

server: the listener, keys and deserialising
inference, admin: the two services
requests: messages to typed requests
answers: output to messages
errors: statuses and details
metadata: keys and trace of a call
"""
