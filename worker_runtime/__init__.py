"""What the prefill and the decode worker share.

Reading order: sequence (one request), prefix_cache, scheduler (what both schedulers do alike),
flight and step_loop (steps on a thread of their own), outlet and shell (routers), host (all of it).
"""
