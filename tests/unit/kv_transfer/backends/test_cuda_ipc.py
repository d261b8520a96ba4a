"""Who has another rank's pool mapped, and until when, over a stand-in for the driver."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from dataclasses import asdict
from random import Random
from threading import Lock
from types import SimpleNamespace

import pytest

from kv_transfer.backends import cuda_ipc
from kv_transfer.backends.base import LinkBroken, LinkId
from kv_transfer.backends.cuda_ipc import CudaIpcBackend, CudaIpcLink
from kv_transfer.backends.host import host_id
from kv_transfer.cuda.copying import PoolShape
from kv_transfer.cuda.driver import DriverError
from tests.support.moves import make_move

LINK = LinkId(sender_epoch=1, receiver_epoch=2, source_rank=0, dest_rank=0, incarnation=1)
SHAPE = PoolShape(num_blocks=4, num_heads=1, page=64, dtype="bfloat16")


class Driver:
    """Maps exported memory; `open` has each address that is mapped, and by which handle."""

    def __init__(self):
        self.open = {}
        self.num_opened = 0
        self.refuses = False

    def open_memory(self, handle):
        if self.refuses:
            raise DriverError("no such memory")
        assert handle not in self.open.values(), "mapped twice"
        self.num_opened += 1
        self.open[self.num_opened << 20] = handle
        return self.num_opened << 20

    def close_memory(self, base):
        del self.open[base]


def endpoint(number, host=None):
    what = {
        "owner": "o",
        "handle": base64.b64encode(bytes([number])).decode(),
        "offset": 16 * number,
        "shape": asdict(SHAPE),
    }
    return f"{host or host_id()}|{json.dumps(what)}"


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(cuda_ipc, "open_memory", made.open_memory)
    monkeypatch.setattr(cuda_ipc, "close_memory", made.close_memory)
    return made


class Backend(CudaIpcBackend):
    """Its copies are in flight until they are landed."""

    def __init__(self, driver):
        self._lock, self._mappings, self._context = Lock(), {}, nullcontext()
        self._pool = SimpleNamespace(prepare=lambda dtype: None)
        self._driver = driver
        self.fails = False

    def launch(self, move, target):
        assert target.address - 16 * self._driver.open[target._base][0] == target._base
        if self.fails:
            raise LinkBroken("the peer's pool has another shape")
        return target

    def land(self, move, write):
        assert write._base in self._driver.open, "unmapped under a write"
        return 7


@pytest.mark.parametrize("seed", range(30))
def test_a_pool_is_mapped_once_and_while_anyone_uses_it(driver, seed):
    random, backend = Random(seed), Backend(driver)
    links, writes = [], []
    for _ in range(300):
        backend.fails, driver.refuses = random.random() < 0.1, random.random() < 0.1
        match random.randrange(5):
            case 0 if len(links) < 6:
                number = random.randrange(3)
                mapped = bytes([number]) in driver.open.values()
                if driver.refuses and not mapped:
                    with pytest.raises(LinkBroken, match="cannot be mapped"):
                        backend.connect(LINK, endpoint(number), 1.0)
                else:
                    links.append((backend.connect(LINK, endpoint(number), 1.0), number))
            case 1 | 2 if links:
                link, number = random.choice(links)
                discard = random.random() < 0.2
                move = make_move((0,), block_size=4, num_layers=1, num_heads=1, discard=discard)
                revoked = random.random() < 0.2 and move.access.revoke()
                try:
                    end = link.send_blocks(move, 1.0)
                except LinkBroken:
                    assert move.access.revoke().done()
                    assert link._closed or (backend.fails and not discard and not revoked)
                else:
                    assert not link._closed
                    assert move.access.revoke().done() == bool(revoked)
                    writes.append((end, move, number, 0 if revoked or discard else 7))
            case 3 if writes:
                end, move, _, result = writes.pop(random.randrange(len(writes)))
                assert end() == result
                assert move.access.revoke().done()
            case 4 if links:
                link, _ = random.choice(links)
                link.close()
                links = [each for each in links if not each[0]._closed or random.random() < 0.5]
        used = {number for link, number in links if not link._closed}
        used |= {number for _, move, number, _ in writes if not move.access.revoke().done()}
        assert {handle[0] for handle in driver.open.values()} == used
    for link, _ in links:
        link.close()
        link.close()
    for end, *_ in writes:
        end()
    assert driver.open == backend._mappings == {}


def test_a_pool_of_another_host_or_none_at_all_is_refused_for_another_backend(driver):
    backend = Backend(driver)
    for bad in (endpoint(1, host="elsewhere"), host_id(), f"{host_id()}|[1]", f"{host_id()}|{{}}"):
        with pytest.raises(LinkBroken) as caught:
            backend.connect(LINK, bad, 1.0)
        assert caught.value.param == "backend"
    assert driver.open == backend._mappings == {}


def test_a_receivers_end_writes_nothing(driver):
    link = CudaIpcLink(LINK, Backend(driver), None)
    with pytest.raises(LinkBroken, match="the receiver's"):
        link.send_blocks(make_move((0,), block_size=4, num_layers=1, num_heads=1), 1.0)
    move = make_move((0,), block_size=4, num_layers=1, num_heads=1)
    assert link.recv_blocks(move, 1.0)() == 0  # no checksum is asked for
    link.close()
    assert driver.num_opened == 0
