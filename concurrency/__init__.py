"""Building blocks for event loops and threads that the other packages share.

event_loop: background tasks; one timer for many deadlines; timeout for a peer that sends nothing
threads: blocking work in a thread of its own
bounded_map: the last records by key
"""
