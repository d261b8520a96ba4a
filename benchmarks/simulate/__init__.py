"""Traces on a virtual clock, with the schedulers and the routing policy that run in production:
`python -m benchmarks.simulate --help`. Only devices and links are models."""
