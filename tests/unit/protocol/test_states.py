import itertools

import pytest

from protocol.errors import StaleMessage
from protocol.states import (
    TRANSFER_TRANSITIONS,
    WORKER_TRANSITIONS,
    TransferState,
    WorkerState,
    check_transfer,
    check_worker,
)

T, W = TransferState, WorkerState


@pytest.mark.parametrize(("current", "target"), itertools.product(T, T))
def test_a_transfer_step_is_listed_or_refused(current, target):
    if target in TRANSFER_TRANSITIONS[current]:
        check_transfer(current, target)
    else:
        with pytest.raises(StaleMessage, match=f"{current}.*{target}"):
            check_transfer(current, target)


@pytest.mark.parametrize(("current", "target"), itertools.product(W, W))
def test_a_worker_step_is_listed_or_refused(current, target):
    if target in WORKER_TRANSITIONS[current]:
        check_worker(current, target)
    else:
        with pytest.raises(StaleMessage, match=f"{current}.*{target}"):
            check_worker(current, target)


def reachable(table, start):
    seen, todo = {start}, [start]
    while todo:
        for state in table[todo.pop()] - seen:
            seen.add(state)
            todo.append(state)
    return seen


def test_every_state_can_be_reached():
    assert reachable(TRANSFER_TRANSITIONS, T.OFFERED) == set(T)
    assert reachable(WORKER_TRANSITIONS, W.STARTING) == set(W)


@pytest.mark.parametrize("state", T)
def test_every_live_hand_off_can_be_aborted_and_every_dead_one_is_final(state):
    if state in (T.RELEASED, T.ABORTED):
        assert TRANSFER_TRANSITIONS[state] == frozenset()
    else:
        assert {T.ABORTED, T.RELEASED} <= TRANSFER_TRANSITIONS[state]


def test_no_state_leads_back():
    for table in (TRANSFER_TRANSITIONS, WORKER_TRANSITIONS):
        for state, targets in table.items():
            for target in targets:
                assert state not in reachable(table, target)


def test_the_main_line_of_a_hand_off():
    line = [T.OFFERED, T.RESERVED, T.MOVING, T.COMMITTED, T.RELEASED]
    for current, target in itertools.pairwise(line):
        check_transfer(current, target)


def test_a_worker_never_serves_before_it_is_ready():
    with pytest.raises(StaleMessage):
        check_worker(W.STARTING, W.DRAINING)
    with pytest.raises(StaleMessage):
        check_worker(W.STOPPED, W.READY)
