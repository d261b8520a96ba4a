"""A router over stub workers, and clients for both front ends."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import router.served_model
from grammar.trial import Trial
from protocol.ids import Role
from protocol.sampling import Grammar
from router.text.tokenizer import ModelText
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, open_front_ends
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import smollm2_folder, write_model_text


class SharedTrial(Trial):
    """One process tries the grammars of all routers with the same special tokens."""

    lock = threading.Lock()

    def check(self, grammar: Grammar) -> None:
        with self.lock:
            super().check(grammar)

    def close(self) -> None:
        """The next router goes on with it."""


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """What routers of the same model share, so that each is up in milliseconds."""
    trials: dict[str, SharedTrial] = {}

    def trial(special: dict[int, str]) -> SharedTrial:
        return trials.setdefault(str(special), SharedTrial(special))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.served_model, "ModelText", functools.cache(ModelText))
        patch.setattr(router.served_model, "Trial", trial)
        yield
    for shared in trials.values():
        Trial.close(shared)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_text(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def text(model_folder: Path) -> ModelText:
    return ModelText(model_folder)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("smollm2-135m is not there; run: baton models get smollm2-135m")
    return folder


@pytest.fixture
async def fleet() -> AsyncIterator[StubFleet]:
    fleet = StubFleet()
    yield fleet
    await fleet.stop()


@pytest.fixture
def make_front_ends(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFrontEnds:
    """Start a router over a fleet's workers: `async with make_front_ends(fleet) as front_ends`."""
    # The fleet is in this process: where that gets no time, no worker stands still.
    monkeypatch.setattr("router.workers.worker_calls._ANSWER_S", 60.0)
    return lambda fleet, **settings: open_front_ends(fleet, model_folder, **settings)


@pytest.fixture
async def front_ends(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> AsyncIterator[FrontEnds]:
    """A router over one prefill and one decode worker."""
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet) as front_ends:
        yield front_ends
