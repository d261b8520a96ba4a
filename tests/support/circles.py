"""What only the garbage collector can free: objects that refer to each other in a circle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def circles() -> Iterator[set[str]]:
    """The classes, with their modules, of what is left in circles at the end of the block."""
    found: set[str] = set()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found |= {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
