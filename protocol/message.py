"""The base class of every value that crosses between processes."""

from __future__ import annotations

from typing import Any, dataclass_transform

import msgspec


class KeywordOnly(msgspec.StructMeta):
    """Sets `kw_only`, the one option that structs do not inherit."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, *args, **{"kw_only": True, **options})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Message(
    msgspec.Struct,
    metaclass=KeywordOnly,
    frozen=True,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """A frozen value that travels as the array of its fields, in order (protocol.codec).

    The last field has no default, so that the decoder refuses an array that ends too early; a class
    in which every field has one takes the defaults. Values hold no cycles: the garbage collector
    skips them. `msgspec.structs.replace` makes a changed copy.
    """
