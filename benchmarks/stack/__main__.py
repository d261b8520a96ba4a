"""The whole stack under a real trace: `python -m benchmarks.stack CONFIG --help`.

For each variant of a configuration: `baton up`, warm-up, windows of traces over gRPC at their own
arrival times, checks of what must hold afterwards, `baton down`. One page for all variants, with
where the time went as the requests' own timelines say it.

    python -m benchmarks.stack deploy/configs/gpu-1p1d.yaml --set model.name=/models/llama-3.1-8b
        --window "conv azure2023_conv.csv 10585 300 1,2" --theme stack-conv
        --variant "nccl transfer.backend=nccl"
        --variant "colocated prefill.replicas=0 decode.replicas=2"
        --split 1+1 --split 0+2

`--split` replays everything once for each split of the live workers' roles, without a new start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import report
from benchmarks.stack.checks import Check, checks_of, until_idle
from benchmarks.stack.options import Later, Plan, Window, parser, slo_of
from benchmarks.stack.page import Act, Replay, Variant, details, raw
from cluster.bench import facts
from cluster.bench.load import Target, closed_loop, timed_arrivals
from cluster.bench.measure import Run, Slo, summarise
from cluster.bench.runs import first_model
from cluster.bench.workload import Ask, Style, fit_trace, read_trace
from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig
from cluster.local.local_ray import load_state
from cluster.models.store import find_model
from protocol.errors import BatonError
from protocol.ids import Role

_WARM_UPS = 12
_WARM_TOKENS = 16
#: Before a command that names a worker by its role, for the question who that is.
_LOOK_UP_S = 5.0
_INTERRUPTED = "interrupted"


def run(plan: Plan, config: ClusterConfig, options: argparse.Namespace) -> list[Variant]:
    """Up, replay in each split of the roles, check, down: a variant for each split. The first that
    fails or is interrupted is the last; it has its error and the replays until then."""
    overrides = [*options.overrides, *plan.overrides]
    began = time.perf_counter()
    try:
        up = _baton("up", options.config, *(f"--set={override}" for override in overrides))
    except KeyboardInterrupt:
        _baton("down", "--now")
        raise
    up_s = time.perf_counter() - began
    if up.returncode:
        return [Variant(name=plan.name, overrides=plan.overrides, error=_last_line(up.stderr))]
    variants: list[Variant] = []
    try:
        for number, split in enumerate(options.splits or [None]):
            variants.append(_replayed(plan, config, options, number, split, up_s))
            if variants[-1].error:
                break
    finally:
        clean = _ends_clean()
    end = Check(what="`baton down` ends every process", seen=str(clean).lower(), ok=clean)
    return [*variants[:-1], replace(variants[-1], checks=(*variants[-1].checks, end))]


def _ends_clean() -> bool:
    """Take the cluster down; whether that ended every process in time."""
    try:
        down = _baton("down")
    except KeyboardInterrupt:  # the replays are over, and are kept
        _baton("down", "--now")
        return False
    return down.returncode == 0 and "killed" not in down.stderr


def _replayed(
    plan: Plan,
    config: ClusterConfig,
    options: argparse.Namespace,
    number: int,
    split: tuple[int, int] | None,
    up_s: float,
) -> Variant:
    """The running cluster's replays in its split of that number, or in the only one that it has."""
    replays: list[Replay] = []
    checks: list[Check] = []
    error = ""
    try:
        if split is not None:
            checks.append(_take_roles(split))
        checks += asyncio.run(_replay_all(config, options, number, replays))
    except KeyboardInterrupt:
        error = _INTERRUPTED
    except (BatonError, OSError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Variant(
        name=plan.name if split is None else f"{plan.name}, {split[0]}P+{split[1]}D",
        overrides=plan.overrides,
        up_s=up_s,
        replays=tuple(replays),
        checks=tuple(checks),
        error=error,
    )


def _take_roles(split: tuple[int, int]) -> Check:
    """Give live workers roles until so many prefill and decode."""
    began, names = time.perf_counter(), _ready_workers()
    prefill, decode = names[Role.PREFILL], names[Role.DECODE]
    if len(prefill) + len(decode) != sum(split):
        raise OSError(f"{sum(split)} workers are wanted, {prefill + decode} are ready")
    changes = [(name, Role.DECODE) for name in prefill[split[0] :]]
    changes += [(name, Role.PREFILL) for name in decode[split[1] :]]
    took = all(_baton("role", name, role.value).returncode == 0 for name, role in changes)
    return Check(
        what=f"{len(changes)} workers change their roles",
        seen=f"{time.perf_counter() - began:.1f} s" if took else "refused",
        ok=took,
    )


def _ready_workers() -> dict[str, list[str]]:
    """Names of workers that are ready, by role."""
    names = {role.value: list[str]() for role in Role}
    for line in _baton("status").stdout.splitlines():
        name, role, state, *_ = [*line.split(), "", "", ""]
        if role in names and state == "ready":
            names[role].append(name)
    return names


async def _replay_all(
    config: ClusterConfig, options: argparse.Namespace, split: int, replays: list[Replay]
) -> list[Check]:
    """Add to `replays` one after the other; what must hold after them."""
    state = load_state()
    assert state is not None
    model = json.loads((find_model(config.model.name) / "config.json").read_text())
    style = Style(
        model=await first_model(f"http://{state.http}"),
        vocab_size=model["vocab_size"],
        timeline=True,
    )
    target = Target(url=f"grpc://{state.grpc}", style=style)
    windows = [(window, speed) for window in options.windows for speed in window.speeds]
    await _warm_up(target, [ask for window in options.windows for ask in _asks(options, window)])
    before = await until_idle(state.http)
    for number, (window, speed) in enumerate(windows, start=1):
        # Prompts follow from the style's seed: none is sent twice, so that no cache can help.
        fresh = replace(target, style=replace(style, seed=split * len(windows) + number))
        asks = _asks(options, window, speed)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_act(later))
                for later in options.laters
                if later.replay in (None, number)
            ]
            results = await timed_arrivals(fresh, asks)
        acts = tuple(task.result() for task in tasks)
        replay = Replay(
            window=window.name,
            number=number,
            speed=speed,
            asks=tuple(asks),
            results=tuple(results),
            acts=acts,
        )
        replays.append(replay)
        await until_idle(state.http)
        facts.say(facts.overview(replay.name, [summarise(results)]))
    results = [result for replay in replays for result in replay.results]
    after = await until_idle(state.http)
    checks = [
        Check(what=f"`baton {act.command}` succeeds", seen=str(act.ok).lower(), ok=act.ok)
        for replay in replays
        for act in replay.acts
    ]
    scaled = bool(options.laters)
    return [*checks_of(results, before, after, scaled=scaled), *checks]


async def _act(later: Later) -> Act:
    await asyncio.sleep(later.at - _LOOK_UP_S if later.looks_up else later.at)
    began = time.perf_counter()
    arguments = later.arguments
    if later.looks_up:
        workers = await asyncio.to_thread(_ready_workers)
        places = {f"@{role}": names[0] for role, names in workers.items() if names}
        arguments = tuple(places.get(argument, argument) for argument in arguments)
        await asyncio.sleep(max(0.0, began + _LOOK_UP_S - time.perf_counter()))
        began = time.perf_counter()
    done = await asyncio.to_thread(_baton, *arguments)
    took = time.perf_counter() - began
    command = shlex.join(arguments)
    return Act(command=command, at=later.at, took=took, ok=done.returncode == 0)


def _asks(options: argparse.Namespace, window: Window, speed: float = 1.0) -> list[Ask]:
    return fit_trace(
        read_trace(window.trace)[window.first :],
        limit=window.limit,
        speed=speed,
        max_prompt=options.prompt_tokens,
        max_output=options.output_tokens,
    )


async def _warm_up(target: Target, asks: Sequence[Ask]) -> None:
    """Prompts of all lengths of the trace, several at a time: kernels are compiled on first use."""
    ordered = sorted(asks, key=lambda ask: ask.prompt_tokens)
    some = ordered[:: max(1, len(ordered) // _WARM_UPS)] + ordered[-1:]
    short = [replace(ask, output_tokens=min(ask.output_tokens, _WARM_TOKENS)) for ask in some]
    results = await closed_loop(target, short, concurrency=4, first_number=1_000_000)
    failed = [result.error for result in results if result.error]
    if failed:
        raise OSError(f"warm-up: {len(failed)} of {len(results)} failed: {failed[0]}")


def _baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line; what it says goes on to our standard error, too."""
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(f"$ baton {shlex.join(arguments)}\n{done.stdout}{done.stderr}")
    sys.stderr.flush()
    return done


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def runs_of(variants: Sequence[Variant], slo: Slo) -> list[Run]:
    """A row of the report for each replay that has results."""
    found = []
    for variant in variants:
        for replay in variant.replays:
            summary = summarise(replay.results, slo)
            found.append(
                Run(
                    label=f"{variant.name}, {replay.name}",
                    prompt_tokens=summary.prompt_tokens,
                    output_tokens=summary.output_tokens,
                    concurrency=None,
                    repeats=(summary,),
                )
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every variant and write the page; 1 when a check failed or a variant did not run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    slos = options.slos or [slo_of(text) for text in ("200/20", "200/20/50", "500/50")]
    plans = options.plans or [Plan(name="as configured", overrides=())]
    configs = [
        load_config(options.config, overrides=[*options.overrides, *plan.overrides]).config
        for plan in plans
    ]
    variants: list[Variant] = []
    try:
        for plan, config in zip(plans, configs, strict=True):
            variants += run(plan, config, options)
            if variants[-1].error == _INTERRUPTED:
                break
    except KeyboardInterrupt:
        facts.say(f"interrupted after {len(variants)} of {len(plans)} variants")
    page = details(variants, slos)
    facts.say(page)
    if options.theme:
        made = report.Report(
            theme=options.theme,
            hardware=options.hardware or facts.processor(),
            command=f"python -m benchmarks.stack {shlex.join(arguments)}",
            server="baton, whole stack under Ray Serve, clients over gRPC",
            model=next((o.partition("=")[2] for o in options.overrides if "model.name=" in o), ""),
            workload=f"{', '.join(window.described for window in options.windows)} at their own "
            "arrival times (xN: N times as fast), prompts of random token ids, ignore_eos",
            note=options.note,
            config=options.config,
            runs=tuple(runs_of(variants, slos[0])),
            details=page,
            data=raw(variants),
        )
        facts.say(f"written: {report.write(made, revision=options.commit)}")
    sound = [variant.sound and not variant.error for variant in variants]
    return int(not all(sound) or len(sound) < len(plans) * len(options.splits or [None]))


if __name__ == "__main__":
    sys.exit(main())
