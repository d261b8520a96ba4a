"""The directory: which routers and workers are ready.

table             the pure state: members, views, expiry
directory         the Ray actor around it
store             what outlives the directory, in Ray's own store
directory_client  how replicas report to it and follow it
"""
