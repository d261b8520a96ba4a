"""The decode role: admission, continuous batching, streaming.

lifecycle: states of a request.
admission: which waiting request gets blocks.
chunking: how many prompt tokens ride along.
commit_delays: when an announced commit comes.
expected: prompts that wait, and when they should be computed.
departures: sequences on their way to another worker.
scheduler: the batch of each step, preemption.
"""
