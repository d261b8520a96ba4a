"""Hand-offs on rank 0's event loop, which owns everything here.

- listeners: what a worker is told about its hand-offs
- context: the worker's identity, calls to peers, commands to ranks
- endpoint: what Sender and Receiver have in common
- sender, outgoing, sender_channel: prefill, its record of one hand-off, its channels
- receiver, incoming, receiver_channel: decode, its record of one hand-off, its channels
- handoffs: the sender and the receiver of one worker
"""
