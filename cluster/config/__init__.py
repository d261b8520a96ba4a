"""The configuration: YAML file, `BATON_*` variables and `--set`, checked before anything starts.

schema  the sections and their fields
load    reads file, environment and overrides; builds the sections, strictly
checks  compares sections with each other, with the model, this machine and the Ray cluster
"""
