"""The ranks of a tensor-parallel engine, on one host: rank 0 commands, followers obey.

messages: commands, reports, and the invitation to join
step_messages: a step as the followers are told it, of block tables what has changed
group: rank 0's end of all followers
follower: a follower's end
tensor_parallel: collectives between the ranks on CPUs
"""
