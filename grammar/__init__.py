"""Structured output. A router tries a grammar (`trial`, in a process of its own) before it relies
on it; workers compile it (`compiler`, within `bounds`, against their `vocabulary`) and ask the
`matcher` of each output which tokens may follow.
"""
