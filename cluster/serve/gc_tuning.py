"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc

#: New containers before the youngest generation is looked at, and how rarely the older ones are. A
#: look takes a microsecond or three for each container that is new and garbage (gRPC's calls leave
#: cycles behind): few at a time, 20,000 at once stopped all streams for 12 to 66 ms.
_THRESHOLDS = (1_000, 400, 50)


def settle_heap() -> None:
    """Take everything that lives now (models, vocabularies, modules) out of the collector's sight,
    and let it look less often: each look stops every stream of the process for as long as it
    takes, and every token makes a few containers. For the whole process; call it once, when
    loading is done."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
