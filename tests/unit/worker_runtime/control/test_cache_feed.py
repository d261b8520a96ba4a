"""What routers are told of a prefix cache adds up to what it holds, however late they listen."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from protocol.kv_layout import CacheChange, hints, split_hints
from worker_runtime.control.event_publisher import CacheFeed

DIGESTS = [bytes([number]) * 32 for number in range(6)]


def take(known: set[int], change: CacheChange | None) -> None:
    if change is not None:
        known.clear() if change.reset else None
        known.difference_update(split_hints(change.removed))
        known.update(split_hints(change.added))


@given(
    st.lists(
        st.one_of(
            st.dictionaries(st.sampled_from(DIGESTS), st.booleans(), min_size=1),
            st.sampled_from(["listen", "open"]),
        ),
        max_size=30,
    )
)
def test_a_router_ends_up_with_what_is_held(events: list[dict[bytes, bool] | str]) -> None:
    feed, held, known = CacheFeed(), set[bytes](), set[int]()
    feed.open("r")
    for event in events:
        if event == "listen":
            take(known, feed.take("r"))
        elif event == "open":
            feed.open("r")
        else:
            assert isinstance(event, dict)
            feed.change(event)
            for digest, here in event.items():
                held.add(digest) if here else held.discard(digest)
    take(known, feed.take("r"))
    assert known == set(split_hints(hints(held)))
    assert feed.take("r") is None


def test_a_router_that_never_listens_costs_no_more_than_the_cache() -> None:
    feed = CacheFeed()
    feed.open("frozen")
    feed.take("frozen")
    names = [number.to_bytes(8, "big") * 4 for number in range(10_000)]
    for number, name in enumerate(names):
        feed.change({name: True})
        if number >= 10:
            feed.change({names[number - 10]: False})
    assert len(feed._pending) <= 1 << 12
    feed.open("other")
    assert len(feed._unsent["frozen"]) == 10
