from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.request_metrics import _covered

TIMES = st.integers(0, 50)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=8)


def test_overlapping_waits_count_once():
    assert _covered([]) == 0
    assert _covered([(1.0, 3.0), (2.0, 4.0)]) == 3.0
    assert _covered([(2.0, 2.5), (1.0, 4.0)]) == 3.0
    assert _covered([(1.0, 2.0), (5.0, 7.0)]) == 3.0


@given(SPANS)
def test_it_is_the_size_of_the_union(spans):
    union = {second for start, end in spans for second in range(start, end)}
    assert _covered(spans) == len(union)
