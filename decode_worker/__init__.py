"""The decode worker: admission, continuous batching, streaming.

lifecycle: states of a request, commands and outputs.
admission: which waiting request gets blocks.
chunking: how many prompt tokens ride along.
scheduler: the batch of each step, preemption.
worker: joins the scheduler to the receiver of kv_transfer.
"""
