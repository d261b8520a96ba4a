"""Structured output: tokens that a grammar does not allow are masked before sampling.

bounds: limits on a grammar's source
references: what JSON Schemas refer to
schema: JSON Schemas as the library takes them
vocabulary: the bytes of every token, for llguidance
matcher: one output's state in its grammar, and its mask of allowed tokens
compiler: grammars to matchers, cached (workers)
trial: compiles new grammars in a process of their own, which may crash (routers)
"""
