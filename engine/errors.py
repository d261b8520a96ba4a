"""Errors of the engine, within the tree of protocol.errors."""

from __future__ import annotations

from protocol.errors import InvalidRequest, Unavailable


class ModelRefused(InvalidRequest):
    """The model folder or the way it is to be split cannot be served.

    `param` names the file, tensor or config field at fault.
    """


class RankLost(Unavailable):
    """A tensor-parallel rank died, fell silent or failed; `param` names it. The engine is lost."""
