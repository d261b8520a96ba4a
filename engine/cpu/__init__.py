"""One rank of an engine on a CPU.

inputs: lays the sequences of a step out in rows, checks them.
runner: loads the model, runs prepared steps, samples.
"""
