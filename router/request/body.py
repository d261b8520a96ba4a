"""The base class of what clients send, and the types that several fields share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, dataclass_transform

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest
from protocol.message import KeywordOnly

#: Integers beyond 64 bits have no meaning in any field and no form in protobuf.
Int64 = Annotated[int, Meta(ge=-(2**63) + 1, le=2**63 - 1)]
#: Templates and grammars walk through JSON by recursion.
MAX_DEPTH = 64


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Body(msgspec.Struct, metaclass=KeywordOnly, frozen=True, forbid_unknown_fields=True):
    """An object of a request. Fields that it does not know are left out and named (strictly: they
    are refused unless null or one of `neutral`); those of `unserved` would change the result, and
    are refused unless null, empty or neutral."""

    neutral: ClassVar[tuple[Any, ...]] = ()
    unserved: ClassVar[frozenset[str]] = frozenset()


def check_depth(value: object, param: str) -> None:
    """Raise InvalidRequest when a JSON value is nested deeper than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, Mapping | list)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param)
