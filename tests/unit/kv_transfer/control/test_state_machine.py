"""The whole protocol under every fault, driven by hypothesis: invariants hold after every step."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_transfer.config import TransferConfig
from protocol.ids import RequestKey
from tests.support.transfer import make_layout
from tests.support.transfer_sim import CONFIG, World

DEGREES = st.sampled_from([1, 2])
SIZES = st.sampled_from([(4, 4), (4, 4), (2, 4), (8, 4), (2, 6), (6, 4)])  # tokens of a block
PICK = st.integers(0, 10**6)


class HandoffMachine(RuleBasedStateMachine):
    """Workers, network and links in any order; every block and every message is accounted for."""

    world: World | None = None

    @initialize(source=DEGREES, dest=DEGREES, sizes=SIZES, small=st.booleans())
    def build(self, source: int, dest: int, sizes: tuple[int, int], small: bool) -> None:
        layout, peer = (
            make_layout(
                tp_size, num_layers=1, num_kv_heads=2, block_size=size, num_blocks=24 // size
            )
            for tp_size, size in zip((source, dest), sizes, strict=True)
        )
        config = CONFIG
        if small:
            config = TransferConfig(
                lease_s=60,
                op_timeout_s=10,
                rpc_timeout_s=1,
                rpc_attempts=2,
                repair_s=5,
                max_piece_bytes=1,
                pipeline_depth=3,
            )
        self.world = World(layout, peer, config)
        self.count = 0

    def teardown(self) -> None:
        if self.world is not None:
            self.world.wind_up()
            self.world.close()

    @rule(
        blocks=st.integers(1, 4),
        both=st.booleans(),
        decode_first=st.booleans(),
        ttl=st.sampled_from([20.0, 120.0]),
    )
    def submit(self, blocks: int, both: bool, decode_first: bool, ttl: float) -> None:
        key = RequestKey(f"r{self.count}")
        self.count += 1
        self._submit(key, blocks, both, decode_first, ttl)

    @precondition(lambda self: self.count)
    @rule(blocks=st.integers(1, 4), which=PICK, attempt=st.integers(0, 2))
    def submit_again(self, blocks: int, which: int, attempt: int) -> None:
        key = RequestKey(f"r{which % self.count}", attempt)
        if key in self.world.sizes:
            return
        self._submit(key, blocks, True, True, 120.0)

    def _submit(self, key, blocks, both, decode_first, ttl) -> None:
        ticket = self.world.ticket(key, blocks, ttl)
        if both or decode_first:
            self.world.offer(key, ticket)
        if both or not decode_first:
            self.world.sizes[key] = blocks
            self.world.expect(key, ticket)

    @precondition(lambda self: self.world.can_reserve())
    @rule(which=PICK, cached=st.sampled_from([0, 0, 1, 4]))
    def reserve(self, which: int, cached: int) -> None:
        keys = self.world.can_reserve()
        self.world.reserve(keys[which % len(keys)], cached)

    @precondition(lambda self: self.world.can_push())
    @rule(which=PICK, count=st.integers(1, 4))
    def run_chunk(self, which: int, count: int) -> None:
        keys = self.world.can_push()
        self.world.step(keys[which % len(keys)], count)

    @precondition(lambda self: self.world.network.letters)
    @rule(
        which=PICK,
        how=st.sampled_from(
            ["deliver", "deliver", "deliver", "deliver", "repeat", "lose", "delay", "lose_reply"]
        ),
    )
    def letter(self, which: int, how: str) -> None:
        letters = self.world.network.letters
        getattr(self.world.network, how)(letters[which % len(letters)])

    @precondition(lambda self: self.world.fabric.can_send())
    @rule(which=PICK)
    def send(self, which: int) -> None:
        wires = self.world.fabric.can_send()
        self.world.fabric.send(wires[which % len(wires)])

    @precondition(lambda self: self.world.fabric.can_receive())
    @rule(which=PICK)
    def receive(self, which: int) -> None:
        wires = self.world.fabric.can_receive()
        self.world.fabric.receive(wires[which % len(wires)])

    @precondition(lambda self: self.world.fabric.wires)
    @rule(which=PICK)
    def snap(self, which: int) -> None:
        wires = list(self.world.fabric.wires.values())
        self.world.fabric.snap(wires[which % len(wires)])
        self.world.loop.settle()

    @precondition(lambda self: self.world.offered)
    @rule(which=PICK, released=st.booleans())
    def decode_leaves(self, which: int, released: bool) -> None:
        keys = sorted(self.world.offered, key=str)
        key = keys[which % len(keys)]
        if key not in self.world.decode.outcomes or key in self.world.decode.running:
            self.world.leave(key, released)

    @precondition(lambda self: self.world.handing_over)
    @rule()
    def hand_over(self) -> None:
        self.world.hand_over()

    @rule(picks=st.lists(PICK, min_size=5, max_size=25))
    def go_on(self, picks: list[int]) -> None:
        """Many events without a fault, so that faults hit hand-offs in every state."""
        for pick in picks:
            events = self.world.events()
            if not events:
                return
            events[pick % len(events)]()
            self.world.check()

    @precondition(lambda self: self.world.expected)
    @rule(which=PICK, released=st.booleans())
    def prefill_leaves(self, which: int, released: bool) -> None:
        keys = sorted(self.world.expected, key=str)
        key = keys[which % len(keys)]
        if key not in self.world.prefill.outcomes:
            self.world.loop.run(self.world.sender.end(key, released))

    @precondition(lambda self: self.world.decode.running)
    @rule(which=PICK)
    def finish(self, which: int) -> None:
        keys = sorted(self.world.decode.running, key=str)
        self.world.decode.finish(keys[which % len(keys)])

    @rule(seconds=st.sampled_from([0.125, 2.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.world.turn_clock(seconds)

    @invariant()
    def accounts_agree(self) -> None:
        if self.world is not None:
            self.world.check()


HandoffMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_handoff_machine = HandoffMachine.TestCase
