"""A router over stub workers, and clients for both doors."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import router.model
from protocol.ids import Role
from router.text.tokenizer import ModelText
from tests.support.router_doors import Doors, MakeDoors, open_doors
from tests.support.stub_workers import StubFleet
from tests.support.tiny_text import smollm2_folder, write_model_text


@pytest.fixture(scope="session", autouse=True)
def _read_once() -> Iterator[None]:
    """Routers of one folder and configuration share the text half of their model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.model, "ModelText", functools.cache(ModelText))
        yield


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
def make_doors(model_folder: Path) -> MakeDoors:
    """Start a router over a fleet's workers: `async with make_doors(fleet, **config) as doors`."""
    return lambda fleet, **settings: open_doors(fleet, model_folder, **settings)


@pytest.fixture
async def doors(fleet: StubFleet, make_doors: MakeDoors) -> AsyncIterator[Doors]:
    """A router over one prefill and one decode worker."""
    await fleet.add(Role.PREFILL)
    await fleet.add(Role.DECODE)
    async with make_doors(fleet) as doors:
        yield doors
