import json
from datetime import UTC, datetime

from benchmarks import report, serve
from benchmarks.measure import Result, summarise
from tests.unit.benchmarks.stub_server import Stub, running


def summary(seconds):
    return summarise(
        [Result(sent=0.0, ended=seconds, chunk_times=(0.5, seconds), output_tokens=10)]
    )


def a_report(config=""):
    repeats = (summary(1.0), summary(4.0), summary(2.0))
    run = report.Run(
        label="4 clients", prompt_tokens=128, output_tokens=64, concurrency=4, repeats=repeats
    )
    return report.Report(
        theme="Serve CPU",
        hardware="Some Xeon (R) @ 2 GHz",
        command="python -m benchmarks.serve",
        server="baton 0.1",
        model="m",
        workload="closed loop",
        note="",
        config=config,
        runs=(run,),
    )


def test_the_row_is_the_repeat_with_the_median_rate():
    assert a_report().runs[0].typical().output_tokens_per_s == 5.0


def test_both_files_are_written_and_never_overwritten(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("a: 1\n")
    now = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
    path = report.write(a_report(str(config)), tmp_path, now)
    assert path.name == "serve-cpu_some-xeon-r-2-ghz_2026-11-27.md"
    page = path.read_text()
    assert "| 4 clients | 128 / 64 | **5.0** (10, 2, 5) |" in page
    assert "note:" not in page
    data = json.loads(path.with_suffix(".json").read_text())
    assert len(data["config_sha256"]) == 12
    assert data["config_sha256"] in page
    assert data["runs"][0]["repeats"][1]["wall_s"] == 4.0
    assert report.write(a_report(), tmp_path, now).name.endswith("_2.md")


def test_the_machine_and_the_commit_are_named():
    assert "cores" in report.machine()
    assert report.commit() != ""


def test_keys_are_not_written_down():
    for arguments in (["--api-key", "s3cret", "--url", "x"], ["--api-key=s3cret", "--url", "x"]):
        shown = serve.command_line(arguments)
        assert "s3cret" not in shown
        assert shown.endswith("--url x")


async def test_the_whole_command_against_a_stub(capsys):
    options = serve.parser().parse_args(
        ["--concurrency", "1,2", "--requests", "4", "--repeats", "2", "--output-tokens", "3"]
    )
    stub = Stub(gap=0.001)
    async with running(stub) as url:
        options.url = url
        runs = await serve.run(options)
    assert [run.label for run in runs] == ["1 client", "2 clients"]
    assert all(len(run.repeats) == 2 for run in runs)
    assert all(s.output_tokens == 12 and not s.failures for run in runs for s in run.repeats)
    assert len(stub.bodies) == 2 + 8 + 4 + 8
    assert stub.bodies[0]["model"] == "stub-model"
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(set(prompts)) == len(prompts)
    assert "2 clients:" in capsys.readouterr().out


async def test_a_second_run_meets_no_prompt_of_the_first_in_a_cache():
    stub = Stub()
    arguments = ["--concurrency", "1", "--requests", "2", "--repeats", "1", "--warmup", "0"]
    async with running(stub) as url:
        for more in ([], ["--prompt-tokens", "256"], ["--seed", "3"], ["--seed", "3"]):
            await serve.run(serve.parser().parse_args([*arguments, *more, "--url", url]))
    prompts = [tuple(body["prompt"][:16]) for body in stub.bodies]
    assert len(set(prompts[:6])) == 6
    assert prompts[4:6] == prompts[6:]  # what was drawn can be asked for again


async def test_a_trace_against_a_stub(tmp_path):
    path = tmp_path / "t.csv"
    rows = "".join(f"{n / 100},0,{n + 1},2\n" for n in range(6))
    path.write_text("t_s,client,input_tokens,output_tokens\n" + rows)
    options = serve.parser().parse_args(
        ["--trace", str(path), "--limit", "5", "--slo-ttft", "5", "--slo-tpot", "5"]
    )
    async with running(Stub()) as url:
        options.url = url
        (run,) = await serve.run(options)
    (only,) = run.repeats
    assert (only.requests, only.failures, only.prompt_tokens) == (5, 0, 15)
    assert only.goodput_per_s > 0


def test_an_absent_server_is_exit_status_2(capsys):
    assert serve.main(["--url", "http://127.0.0.1:1", "--model", ""]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().out
