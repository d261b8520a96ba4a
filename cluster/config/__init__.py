"""The configuration: YAML file, `BATON_*` variables and `--set`, checked before anything starts.

schema  the sections and their fields
load    reads file, environment and overrides into one tree
tree    builds the sections from the tree, strictly
checks  compares sections with each other, with the model, this machine and the Ray cluster
"""
