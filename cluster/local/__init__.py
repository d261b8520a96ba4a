"""The Ray cluster that `baton up` starts and owns on one machine.

local_ray  starts, finds and stops it; its state file
ray_head   the process that holds Ray's daemons
paths      directories of models, state and logs; file locks
"""
