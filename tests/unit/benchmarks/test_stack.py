import subprocess
from pathlib import Path

import pytest

from benchmarks.stack import __main__ as stack
from benchmarks.stack.checks import Figures, checks_of
from benchmarks.stack.options import Later, Plan, Window, later_of, parser
from benchmarks.stack.page import Act, Replay, Variant, details, phases, raw
from cluster.bench.measure import Result, Slo
from cluster.bench.workload import Ask
from protocol.timeline import Phase

METRICS = """
baton_num_requests_running 0
baton_worker_requests_waiting{{role="decode"}} {waiting}
baton_handoffs_total{{role="prefill",outcome="committed"}} {committed}
baton_handoffs_total{{role="decode",outcome="committed"}} {committed}
baton_handoffs_total{{role="decode",outcome="released"}} {released}
baton_handoff_bytes_total{{role="prefill"}} {moved}
baton_handoff_failures_total{{role="decode",cause="deadline_exceeded"}} {failed}
baton_local_prefills_total{{reason="short_prompt"}} {short}
baton_prompts_given_back_total{{role="prefill"}} {given_back}
baton_worker_requests_total{{role="decode",outcome="moved"}} {moves}
baton_worker_requests_total{{role="decode",outcome="finished"}} {committed}
baton_kv_blocks{{role="decode",state="free"}} 90
baton_kv_blocks{{role="decode",state="held"}} {held}
baton_kv_blocks{{role="prefill",state="cached"}} 10
"""


def figures(committed=0, **changes):
    values = dict.fromkeys(
        ("short", "failed", "held", "waiting", "given_back", "moves", "released"), 0
    )
    values |= {"moved": committed * 10**9}
    return Figures(METRICS.format(committed=committed, **(values | changes)))


def result(start=0.0, **changes):
    spans = [
        {
            "phase": "prefill",
            "start": 100.0,
            "end": 100.01,
            "place": "p",
            "counts": {"tokens": "9"},
        },
        {"phase": "transfer", "start": 100.01, "end": 100.012},
        {"phase": "decode_queue", "start": 100.0125, "end": 100.0125},
    ]
    fields = {
        "sent": start,
        "ended": start + 0.5,
        "chunk_times": (start + 0.1, start + 0.13, start + 0.5),
        "prompt_tokens": 9,
        "output_tokens": 3,
        "timeline": {"arrival": 99.99, "spans": spans},
    }
    return Result(**(fields | changes))


def failing(checks):
    return [check.what for check in checks if not check.ok]


def test_a_sound_run_passes_every_check():
    checks = list(checks_of([result()] * 4, figures(5, short=1), figures(8, short=2)))
    assert failing(checks) == []
    assert checks[1].seen == "committed 3, 3.0 GB; short_prompt 1; 0 given back; 0 moves"


def test_prompts_that_were_given_back_count_again():
    checks = list(checks_of([result()] * 4, figures(), figures(5, short=2, given_back=3)))
    assert failing(checks) == []
    assert checks[1].seen == "committed 5, 5.0 GB; short_prompt 2; 3 given back; 0 moves"


def test_outputs_that_moved_were_handed_off_twice():
    checks = list(checks_of([result()] * 4, figures(), figures(6, moves=2)))
    assert failing(checks) == []
    assert checks[1].seen == "committed 6, 6.0 GB; none; 0 given back; 2 moves"


def test_a_move_may_be_cut_short_by_the_end_of_its_output():
    sound = figures(6, moves=2, released=1)
    assert failing(checks_of([result()] * 4, figures(), sound)) == []
    for after in (figures(8, moves=2, released=1), figures(6, moves=3, released=0)):
        (failed,) = failing(checks_of([result()] * 4, figures(), after))
        assert "hand-offs by outcome" in failed


def test_a_worker_is_named_by_its_role():
    later = later_of("8@2 role @prefill decode")
    assert later == Later(at=8.0, replay=2, arguments=("role", "@prefill", "decode"))
    assert later.looks_up
    assert not later_of("8 scale --decode 2").looks_up


@pytest.mark.parametrize(
    ("after", "what"),
    [
        ({"committed": 3}, "hand-offs by outcome"),
        ({"committed": 5}, "hand-offs by outcome"),
        ({"committed": 4, "given_back": 1}, "hand-offs by outcome"),
        ({"committed": 4, "released": 1}, "hand-offs by outcome"),
        ({"committed": 4, "moved": 0}, "their KV"),
        ({"committed": 4, "failed": 1}, "hand-offs that failed"),
        ({"committed": 4, "held": 2}, "blocks in use"),
        ({"committed": 4, "waiting": 1}, "blocks in use"),
    ],
)
def test_what_is_not_sound_is_named(after, what):
    (failed,) = failing(checks_of([result()] * 4, figures(), figures(**after)))
    assert what in failed


def test_workers_that_left_take_their_counts_along():
    results = [result()] * 4
    assert failing(checks_of(results, figures(), figures(3), scaled=True)) == []
    assert failing(checks_of(results, figures(), figures(3, moved=0), scaled=True)) == []
    assert len(failing(checks_of(results, figures(), figures(5), scaled=True))) == 1


def test_a_request_that_failed_fails_the_run():
    results = [result(), Result(sent=0.0, ended=1.0, error="2 output tokens instead of 3")]
    checks = list(checks_of(results, figures(), figures(2)))
    assert failing(checks) == ["requests that completed with exactly the requested tokens"]
    assert checks[0].seen == "1 of 2"


def test_the_page():
    asks = tuple(Ask(at=float(n), prompt_tokens=9, output_tokens=3) for n in range(3))
    results = (result(), result(1.0), Result(sent=2.0, ended=2.5, error="lost"))
    checks = tuple(checks_of(results, figures(), figures(3)))
    act = Act(command="scale --decode 2", at=8.0, took=20.04, ok=True)
    turn = Act(command="role p prefill", at=0.25, took=1.0, ok=True)
    replay = Replay(window="conv", speed=1.0, asks=asks, results=results, acts=(act, turn))
    variants = [
        Variant(
            name="nccl", overrides=("transfer.backend=nccl",), replays=(replay,), checks=checks
        ),
        Variant(name="broken", overrides=(), error="no GPU"),
    ]
    page = details(variants, [Slo(ttft=0.2, tpot=0.3), Slo(ttft=0.05, tpot=1.0, gap=0.05)])
    assert "| nccl, conv x1 | 2/3 (0.80/s) | 0/3 (0.00/s) | 370.0 / 370.0 / 370.0 | 30.0 /" in page
    assert "TTFT <= 50 ms, TPOT <= 1000 ms, every gap <= 50 ms" in page
    assert "| 2.5 / 2.5 / 2.5 |" in page
    assert "| prefill | 10.00 | 10.00 | p | tokens 9 |" in page
    assert "| transfer | 20.00 | 2.00 | router |  |" in page
    assert "`baton scale --decode 2` 8 s into conv x1 took 20.0 s." in page
    assert "| prefill | p | 2 | 0.0 | 1.0 |" in page
    assert "Longest gap of any stream: 370.0 ms." in page
    assert "Longest gap of the 0 streams that moved: 0.0 ms." in page
    assert "p first worked as prefill 0.76 s after `baton role p prefill` began." in page
    assert "**Did not finish: no GPU**" in page
    assert not variants[0].sound
    rows = raw(variants)["nccl"]["replays"][0]["requests"]
    assert rows[1] == {
        "at": 1.0,
        "in": 9,
        "out": 3,
        "ttft": 100.0,
        "tpot": 200.0,
        "e2e": 500.0,
        "max_gap": 370.0,
        "second": 30.0,
        "prefill": 10.0,
        "transfer": 2.0,
        "decode_queue": 0.0,
    }
    assert rows[2]["error"] == "lost"


def test_phases_are_pooled_in_the_order_of_a_life():
    found = phases([result(), result()])
    assert list(found) == [Phase.PREFILL, Phase.TRANSFER, Phase.DECODE_QUEUE]
    assert found[Phase.TRANSFER] == pytest.approx([0.002, 0.002])


def test_variants_slos_and_commands_on_the_command_line():
    window = ["--window", "conv t.csv 7 300 1,2.5"]
    arguments = ["c.yaml", *window, "--variant", "nccl a.b=1 c=2", "--slo", "200/20/50"]
    during = ["--during", "8 scale --decode 2", "--during", "0.5@3 down"]
    options = parser().parse_args([*arguments, *during])
    assert options.plans == [Plan(name="nccl", overrides=("a.b=1", "c=2"))]
    assert options.windows == [
        Window(name="conv", trace=Path("t.csv"), first=7, limit=300, speeds=(1.0, 2.5))
    ]
    assert options.slos == [Slo(ttft=0.2, tpot=0.02, gap=0.05)]
    assert options.laters == [
        Later(at=8.0, arguments=("scale", "--decode", "2")),
        Later(at=0.5, replay=3, arguments=("down",)),
    ]


def test_a_split_changes_only_the_roles_that_it_has_to(monkeypatch):
    status = """
WORKER    ROLE     STATE  RUNNING
decode-a  decode   ready        0
prefill-b prefill  ready        0
prefill-c prefill  ready        1
"""
    ran = []

    def baton(*arguments):
        ran.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, stdout=status, stderr="")

    monkeypatch.setattr(stack, "_baton", baton)
    options = parser().parse_args(["c.yaml", "--window", "w t.csv 0 1 1", "--split", "1+2"])
    assert options.splits == [(1, 2)]
    check = stack._take_roles((1, 2))
    assert check.ok
    assert check.what == "1 workers change their roles"
    assert ran == [("status",), ("role", "prefill-c", "decode")]
    with pytest.raises(OSError, match="4 workers are wanted"):
        stack._take_roles((2, 2))


def test_replays_are_kept_when_the_end_is_interrupted(monkeypatch):
    commands = []

    def baton(*arguments):
        commands.append(arguments)
        if arguments == ("down",):
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(arguments, 0, "", "")

    done = Variant(name="x", overrides=(), replays=())
    monkeypatch.setattr(stack, "_baton", baton)
    monkeypatch.setattr(stack, "_replayed", lambda *_: done)
    options = parser().parse_args(["c.yaml", "--window", "conv t.csv 0 1 1"])
    [kept] = stack.run(Plan(name="x", overrides=()), None, options)
    assert [check.ok for check in kept.checks] == [False]
    assert commands[-1] == ("down", "--now")
