"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc

#: New containers before the youngest generation is looked at, and how rarely the older ones are.
_THRESHOLDS = (20_000, 20, 50)


def settle_heap() -> None:
    """Take everything that lives now (models, vocabularies, modules) out of the collector's sight,
    and let it look less often: each look stops every stream of the process for as long as it
    takes, and every token makes a few containers. For the whole process; call it once, when
    loading is done."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
