"""Errors of the engine, within the tree of protocol.errors."""

from __future__ import annotations

from protocol.errors import InvalidRequest, Unavailable


class ModelRefused(InvalidRequest):
    """The model folder, dtype or tensor-parallel degree cannot be served; `param` names the file,
    tensor or field at fault."""


class RankLost(Unavailable):
    """A tensor-parallel rank died, hangs or failed; `param` names it. The engine is lost."""
