"""The benchmark of conversations: what it sends and what it says."""

from benchmarks import conversations
from tests.unit.cluster.bench.stub_server import Stub, running


async def test_a_second_run_has_conversations_of_its_own() -> None:
    stub = Stub()
    shape = ("--clients", "1", "--conversations", "1", "--turns", "1", "--repeats", "0")
    async with running(stub) as url:
        for _ in range(2):
            await conversations.run(conversations.parser().parse_args(["--url", url, *shape]))
    first, second = (body["prompt"] for body in stub.bodies)
    assert first[:16] != second[:16]


async def test_each_turn_has_all_before_it_and_the_figures_say_what_was_cached() -> None:
    stub = Stub()
    async with running(stub) as url:
        options = conversations.parser().parse_args(
            [
                *("--url", url, "--clients", "2", "--conversations", "2", "--turns", "3"),
                *("--system-tokens", "8", "--user-tokens", "4", "--output-tokens", "3"),
                *("--repeats", "1"),
            ]
        )
        repeats = await conversations.run(options)
    runs = conversations.runs_of(options, repeats)
    assert [run.prompt_tokens for run in runs] == [12, 19, 26]
    assert [run.label for run in runs] == [
        "turn 1: 25% cached",
        "turn 2: 21% cached",  # 4 of 19
        "turn 3: 23% cached",  # 6 of 26
    ]
    assert [run.repeats[0].requests for run in runs] == [4, 4, 4]
    prompts = [body["prompt"] for body in stub.bodies][6:]  # the warm-up was one conversation each
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    for longer in (prompt for prompt in prompts if len(prompt) > 12):
        before = next(p for p in prompts if p == longer[: len(p)] and len(p) == len(longer) - 7)
        assert longer[len(before) :][:3] == [0, 1, 2]
