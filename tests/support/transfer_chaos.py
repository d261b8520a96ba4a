"""Random hand-offs under random faults: like the hypothesis machine, but weighted so that most
succeed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from kv_transfer.config import TransferConfig
from protocol.ids import RequestKey
from tests.support.transfer import make_layout
from tests.support.transfer_sim import CONFIG, World


class Chaos:
    """Runs `count` hand-offs through one world; `fault_rate` is the share of events that are
    faults."""

    def __init__(self, seed: int, *, fault_rate: float, one_sided: bool = False) -> None:
        self.random = random.Random(seed)
        self.fault_rate = fault_rate
        shape = {"num_layers": 1, "num_kv_heads": 2, "num_blocks": 12}
        degrees = [self.random.choice([1, 2]) for _ in range(2)]
        sizes = self.random.choice([(4, 4), (4, 4), (8, 4), (2, 8), (6, 4)])
        layouts = [
            make_layout(degree, **shape | {"block_size": size, "num_blocks": 48 // size})
            for degree, size in zip(degrees, sizes, strict=True)
        ]
        config = CONFIG
        if self.random.random() < 0.5:
            config = TransferConfig(
                lease_s=60,
                op_timeout_s=10,
                rpc_timeout_s=1,
                rpc_attempts=2,
                repair_s=5,
                max_piece_bytes=1,
                device_piece_bytes=1,
                pipeline_depth=3,
            )
        self.world = World(layouts[0], layouts[1], config, one_sided=one_sided)
        self.coming: list[Callable[[], None]] = []

    def run(self, count: int) -> Counter[str]:
        """Returns how the hand-offs ended on decode. Asserts every invariant after every event."""
        submitted = 0
        steps = 0
        while submitted < count or steps < 40 * count:
            steps += 1
            live = self.world.receiver.num_live
            if submitted < count and live < 5 and self.random.random() < 0.3:
                self._submit(RequestKey(f"r{submitted}"))
                submitted += 1
            elif submitted == count and live == 0 and not self.coming:
                break
            elif self.random.random() < self.fault_rate:
                self._fault()
            else:
                self._progress()
            self.world.check()
        while self.coming:
            self.coming.pop()()
        self.world.wind_up()
        self.world.close()
        return Counter(outcome for (outcome,) in self.world.decode.outcomes.values())

    def _submit(self, key: RequestKey) -> None:
        ticket = self.world.ticket(key, self.random.randint(1, 4))
        both = [lambda: self.world.offer(key, ticket), lambda: self.world.expect(key, ticket)]
        self.random.shuffle(both)
        both[0]()
        self.coming.append(both[1])  # the other worker learns of it later

    def _progress(self) -> None:
        world, choose = self.world, self.random.choice
        choices: list[Callable[[], None]] = []
        if self.coming:
            choices.append(lambda: self.coming.pop(self.random.randrange(len(self.coming)))())
        if world.handing_over:
            choices.append(world.hand_over)
        if world.can_reserve():
            choices.append(lambda: world.reserve(choose(world.can_reserve()), choose([0, 0, 1, 4])))
        if world.can_push():
            choices.append(lambda: world.step(choose(world.can_push()), self.random.randint(1, 3)))
        if world.network.letters:
            choices += [lambda: world.network.deliver(choose(world.network.next()))] * 2
        if world.fabric.can_send():
            choices.append(lambda: world.fabric.send(choose(world.fabric.can_send())))
        if world.fabric.can_receive():
            choices.append(lambda: world.fabric.receive(choose(world.fabric.can_receive())))
        if world.decode.running:
            choices.append(
                lambda: world.decode.finish(choose(sorted(world.decode.running, key=str)))
            )
        if choices:
            choose(choices)()
        else:
            world.turn_clock(3.0)

    def _fault(self) -> None:
        world, choose = self.world, self.random.choice
        kind = self.random.randrange(8)
        if kind < 4 and world.network.letters:
            fault = ["repeat", "lose", "delay", "lose_reply"][kind]
            getattr(world.network, fault)(choose(world.network.letters))
        elif kind == 4 and world.fabric.wires:
            world.fabric.snap(choose(list(world.fabric.wires.values())))
            world.loop.settle()
        elif kind == 5:
            world.turn_clock(choose([0.5, 6.0]))
        elif kind == 6:
            self._leave()

    def _leave(self) -> None:
        world = self.world
        if self.random.random() < 0.5:
            live = [k for k in sorted(world.expected, key=str) if k not in world.prefill.outcomes]
            if live:
                world.loop.run(
                    world.sender.end(self.random.choice(live), self.random.random() < 0.5)
                )
            return
        over = {key for key, outcome in world.decode.outcomes.items() if outcome == ["ended"]}
        live = [k for k in sorted(world.offered, key=str) if k not in over]
        live = [k for k in live if k not in world.decode.outcomes or k in world.decode.running]
        if live:
            world.leave(self.random.choice(live), self.random.random() < 0.5)
