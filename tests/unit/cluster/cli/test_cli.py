"""The command line: its shape, its errors and its exit codes. Nothing is started."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.bench.runs import Measured
from cluster.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, main
from cluster.cli import models as models_command
from cluster.cli import up as up_command
from cluster.cli.arguments import DEFAULT_QUESTION, make_parser
from cluster.cli.console import Console
from cluster.cli.generate import default_target, sampling
from cluster.config.schema import (
    ClusterConfig,
    LifecycleSection,
    ModelSection,
    NetworkSection,
    RaySection,
)
from cluster.local.local_ray import RunningCluster, _process, load_state, save_state
from cluster.local.paths import file_lock, run_dir
from protocol.errors import Internal, InvalidRequest, NotFound, Unavailable
from router.auth.keys import load_keys
from router.fingerprint import baton_version


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BATON_CONFIG", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # `connected` lowers the priority of its process for good.
    monkeypatch.setattr(os, "nice", lambda _: None)
    return tmp_path / "home"


def parse(*argv: str):
    return make_parser().parse_args(argv)


def test_commands_are_a_known_list() -> None:
    commands = make_parser()._subparsers._group_actions[0].choices
    assert sorted(commands) == [
        "bench",
        "chat",
        "demo",
        "doctor",
        "down",
        "drain",
        "generate",
        "keys",
        "models",
        "role",
        "scale",
        "status",
        "up",
        "usage",
    ]


def test_up() -> None:
    options = parse("up", "c.yaml", "--set", "a.b=1", "--set", "c=2", "--block")
    assert (options.config, options.overrides, options.foreground) == (
        "c.yaml",
        ["a.b=1", "c=2"],
        True,
    )
    options = parse("up", "--model", "org/name@main", "--set", "model.dtype=float16")
    assert options.overrides == ["model.name=org/name@main", "model.dtype=float16"]
    assert parse("up").config == "local-cpu"
    assert not parse("up").foreground


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"baton {baton_version()}\n"


@pytest.mark.parametrize(("arguments", "fetched"), [((), 1), (("--model", "org/name"), 0)])
def test_the_model_of_the_default_is_fetched_and_no_other(
    arguments: tuple[str, ...], fetched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    names: list[str] = []
    monkeypatch.setattr(up_command, "get_model", lambda name: names.append(name) or Path(name))
    with pytest.raises(NotFound, match="is neither fetched nor a folder"):
        up_command.read_config(parse("up", *arguments), Console())
    assert len(names) == fetched


def test_a_wrong_field_is_refused_before_the_model_is_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up_command, "get_model", None)
    code, error = one_line_error(["up", "--set", "decode.replicas=0"], capsys)
    assert code == EXIT_USAGE
    assert "decode.replicas: must be at least 1" in error


def test_config_has_an_environment_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONFIG", "mine.yaml")
    assert parse("up").config == "mine.yaml"
    assert parse("demo").config == "mine.yaml"
    assert parse("up", "other.yaml").config == "other.yaml"


def test_demo_and_scale_and_drain() -> None:
    assert parse("demo").question == DEFAULT_QUESTION
    scale = parse("scale", "--prefill", "2", "--decode", "3")
    assert (scale.prefill, scale.decode, scale.router) == (2, 3, None)
    assert parse("drain", "decode-1").worker == "decode-1"


@pytest.mark.parametrize(
    ("argv", "url"),
    [
        (["bench"], "http://h:8"),
        (["bench", "grpc://x:2", "--limit", "3"], "grpc://x:2"),
        (["bench", "--tls"], "https://h:8"),
    ],
)
def test_bench_measures_what_was_named(
    argv: list[str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[argparse.Namespace] = []

    def measure(options: argparse.Namespace) -> list[Measured]:
        measured.append(options)
        raise Unavailable("no server")

    monkeypatch.setattr("cluster.bench.output.measure_now", measure)
    save_state(RunningCluster(address="h:1", token="", config="c", http="h:8"))
    assert main(argv) == EXIT_FAILED
    (options,) = measured
    assert (options.url, options.limit) == (url, 3 if "--limit" in argv else 200)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["scale", "--prefill", "-1"],
        ["scale", "--decode", "x"],
        ["drain"],
        ["generate"],
        ["generate", "x", "--max-tokens", "0"],
        ["generate", "x", "--seed", "9223372036854775808"],
        ["generate", "x", "--top-k", "-2"],
        ["models"],
        ["models", "get"],
        ["bench", "--repeats", "0"],
        ["bench", "--requests", "0"],
        ["bench", "--prompt-tokens", "x"],
    ],
)
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def one_line_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(argv)
    error = capsys.readouterr().err
    assert error.startswith("baton: error: ")
    assert "Traceback" not in error
    return code, error


def test_bad_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: tiny}")
    code, error = one_line_error(["up", str(path), "--set", "model.dtpye=x"], capsys)
    assert code == EXIT_USAGE
    assert "model.dtpye" in error
    assert "did you mean model.dtype?" in error
    code, error = one_line_error(["up", str(path)], capsys)
    assert code == EXIT_USAGE
    assert "model 'tiny'" in error


def test_replicas_get_absolute_paths_of_models_and_plain_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (home / "models" / "fetched", tmp_path / "mine"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for check in ("check_config", "check_folder"):
        monkeypatch.setattr(up_command, check, lambda *_, **__: None)
    for given, expected in (("mine", str(tmp_path / "mine")), ("fetched", "fetched")):
        Path("c.yaml").write_text(f"model: {{name: {given}}}")
        config = up_command.read_config(parse("up", "c.yaml"), Console())
        assert config.model.name == expected


@pytest.mark.parametrize("argv", [["down"], ["status"], ["scale", "--decode", "2"], ["drain", "w"]])
def test_without_a_cluster(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, error = one_line_error(argv, capsys)
    assert code == EXIT_FAILED
    assert "baton up" in error


@pytest.mark.parametrize("argv", [["status"], ["scale", "--decode", "2"], ["drain", "w"]])
def test_a_cluster_deployed_by_other_tools_is_found_by_ray_address(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KubeRay sets RAY_ADDRESS in its pods; no `baton up` ran there."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, error = one_line_error(argv, capsys)
    assert code == EXIT_FAILED
    assert "the Ray cluster at 127.0.0.1:1 does not answer" in error
    code, error = one_line_error(["down"], capsys)  # only for what `baton up` started
    assert "no cluster is up here" in error


def test_scale_needs_a_pool_and_at_least_one_decode(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = one_line_error(["scale"], capsys)
    assert code == EXIT_USAGE
    code, error = one_line_error(["scale", "--decode", "0"], capsys)
    assert code == EXIT_USAGE
    assert "--decode must be at least 1" in error


def test_more_routers_need_ports_that_they_can_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = NetworkSection(metrics_port=9100)
    config = ClusterConfig(model=ModelSection(name="m"), network=network)
    directory = SimpleNamespace(config=SimpleNamespace(remote=lambda: config))
    connected = contextlib.nullcontext(directory)
    monkeypatch.setattr("cluster.cli.session.connected", lambda: connected)
    monkeypatch.setattr("cluster.cli.session.ask", lambda *answers: answers)
    monkeypatch.setattr("cluster.serve.deployments.scale", None)
    code, error = one_line_error(["scale", "--router", "2"], capsys)
    assert code == EXIT_USAGE
    assert "network.metrics_port: must be 0" in error


def test_no_router(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["chat", "hi", "--target", "127.0.0.1:1"]
    code, error = one_line_error(argv, capsys)
    assert code == EXIT_FAILED
    assert "no router answers at 127.0.0.1:1" in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tls-cert", "c.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-key", "k.pem"], "--tls-cert and --tls-key go together"),
        (["--tls-ca", __file__], f"--tls-ca {__file__}: "),
        (["--tls-ca", "nowhere.pem"], "--tls-ca nowhere.pem: No such file or directory"),
        (["--tls-cert", __file__, "--tls-key", "k"], f"--tls-cert {__file__} with --tls-key k: "),
        (["--api-key", "a\nb"], "--api-key must be printable ASCII"),
        (["--system", "\udcff"], "text must be UTF-8"),
    ],
)
def test_what_no_router_can_be_called_with(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = one_line_error(["chat", "hi", *argv], capsys)
    assert code == EXIT_USAGE
    assert message in error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "interrupted"),
        (Internal("it broke"), EXIT_FAILED, "it broke"),
        (OSError(28, "No space left", "/a/b"), EXIT_FAILED, "[Errno 28] No space left: '/a/b'"),
    ],
)
def test_interrupt_and_defect(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options, console) -> None:
        raise error

    monkeypatch.setattr(models_command, "run", run)
    assert one_line_error(["models", "list"], capsys) == (code, f"baton: error: {message}\n")


def test_an_answer_shows_in_a_narrow_locale() -> None:
    code = (
        "import cluster.cli.operate as s; s.run = lambda _, console: console.say('caf\xe9 \u65e5');"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code} import cluster.cli as c; c.main(['status'])"],
        capture_output=True,
        check=True,
        cwd=Path(__file__).resolve().parents[4],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.stdout == b"caf\xe9 ?\n"


def test_a_start_that_is_refused_takes_nothing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared Ray may run a cluster that was started elsewhere."""
    monkeypatch.setattr("cluster.cli.session.connect", lambda _: None)
    monkeypatch.setattr("cluster.membership.directory.find_directory", lambda: None)
    monkeypatch.setattr(up_command, "take_down", None)
    config = ClusterConfig(model=ModelSection(name="m"), ray=RaySection(address="h:1"))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Unavailable, match="a Baton cluster runs on this Ray already"):
            up_command.bring_up(config, "c.yaml", Console())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_of_two_concurrent_starts_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits until the first one is recorded."""
    locked = threading.Event()

    def other_start() -> None:
        with file_lock(run_dir() / "up.lock"):
            locked.set()
            time.sleep(0.1)
            save_state(RunningCluster(address="", token="", config="first.yaml"))

    monkeypatch.setattr(up_command, "spawn_local_ray", None)
    other = threading.Thread(target=other_start)
    other.start()
    locked.wait(60)
    with pytest.raises(InvalidRequest, match=r"up already \(first.yaml\)"):
        up_command.bring_up(ClusterConfig(model=ModelSection(name="m")), "c", Console())
    other.join(60)


@pytest.mark.parametrize(("answers", "drain_s"), [(True, 300.0), (False, 60.0)])
def test_the_drain_lasts_as_long_as_configured(
    answers: bool, drain_s: float, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The cluster is taken down even when that is too short."""
    limits: list[float] = []
    killed: list[object] = []
    config = ClusterConfig(model=ModelSection(name="m"), lifecycle=LifecycleSection(drain_s=300.0))
    asked = SimpleNamespace(remote=lambda: None)
    directory = SimpleNamespace(config=asked, secret=asked)
    store = SimpleNamespace(clear=lambda: cleared.append(True))
    cleared: list[bool] = []

    def ask(*_: object) -> list[object]:
        if not answers:
            raise Unavailable("the directory does not answer")
        return [config, b"secret"]

    def undeploy(limit: float) -> None:
        limits.append(limit)
        raise Unavailable("not ended in time: decode")

    monkeypatch.setattr("cluster.cli.session.connect", lambda _: None)
    monkeypatch.setattr("cluster.cli.session.disconnect", lambda: None)
    monkeypatch.setattr("cluster.cli.session.ask", ask)
    monkeypatch.setattr("cluster.membership.directory.find_directory", lambda: directory)
    monkeypatch.setattr("cluster.serve.control.undeploy", undeploy)
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr("cluster.membership.store.ClusterStore", lambda _: store)
    up_command.take_down(RunningCluster(address="h:1", token="", config="c"), Console(), now=False)
    assert limits == [drain_s + 30.0]
    assert killed == [directory]
    assert cleared == [True] * answers
    said = capsys.readouterr().err
    assert f"running requests have {drain_s:.0f} s" in said
    assert "baton: warning: not ended in time: decode" in said


@pytest.mark.parametrize("now", [False, True])
def test_ctrl_c_while_stopping_leaves_no_process(
    now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Ctrl-C cuts the drain short; a second one does not interrupt the clean-up."""
    calls: list[bool] = []

    def take_down(state: RunningCluster, console: Console, *, now: bool) -> None:
        calls.append(now)
        signal.raise_signal(signal.SIGINT)
        calls.append(now)

    monkeypatch.setattr(up_command, "take_down", take_down)
    # A shell ignores it for background jobs, which the tests may be.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        up_command.stop(RunningCluster(address="h:1", token="", config="c"), Console(), now=now)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == ([True, True] if now else [False, True, True])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_while_starting_stops_what_was_started(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing reads what the command says."""
    started = RunningCluster(address="", token="", config="c", pid=2**22 + 1, started=5)
    stopped: list[RunningCluster] = []

    def killed(*_: object) -> RunningCluster:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not taken")

    def unread(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(up_command, "_spawn_or_attach", lambda *_: started)
    monkeypatch.setattr(up_command, "_wait_for_ray", killed)
    monkeypatch.setattr(up_command, "stop_local_ray", lambda state: stopped.append(state) or 1)
    monkeypatch.setattr("builtins.print", unread)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            up_command.bring_up(ClusterConfig(model=ModelSection(name="m")), "c.yaml", Console())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert stopped == [started]


def test_the_foreground_notices_that_ray_is_gone() -> None:
    state = RunningCluster(address="h:1", token="", config="c")
    up_command.check_alive(state)  # of a Ray elsewhere nothing is known
    with pytest.raises(Unavailable, match="has lost the head process"):
        up_command.check_alive(replace(state, pid=2**22 + 1, started=5))
    own = replace(state, pid=os.getpid(), started=_process(os.getpid()).started)
    with pytest.raises(Unavailable, match="has lost gcs_server and raylet"):
        up_command.check_alive(own)


def test_a_start_that_was_cut_off_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    save_state(RunningCluster(address="", token="t", config="c"))
    code, error = one_line_error(["status"], capsys)
    assert code == EXIT_FAILED
    assert "cut off: `baton down`" in error


def test_a_missing_ray_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    save_state(RunningCluster(address="127.0.0.1:1", token="", config="c"))
    code, error = one_line_error(["status"], capsys)
    assert code == EXIT_FAILED
    assert "the Ray cluster at 127.0.0.1:1 does not answer: [Errno 111]" in error


def test_models_list_and_path(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 2_000_000)
    assert main(["models", "path", "mine"]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["mine", "2", "MB", str(folder)]
    assert lines[2].split() == ["smollm2-135m", "-", "baton", "models", "get", "smollm2-135m"]


def test_options_of_a_request() -> None:
    options = parse(
        "generate", "x", "--temperature", "0", "--stop", "a", "--stop", "b", "--seed", "7"
    )
    assert sampling(options) == {"temperature": 0.0, "stop": ["a", "b"], "seed": 7}
    assert sampling(parse("generate", "x", "--ignore-eos")) == {"ignore_eos": True}
    assert sampling(parse("chat", "x", "--timeline")) == {"timeline": True}


def test_default_target_is_the_running_cluster() -> None:
    assert default_target() == "127.0.0.1:9000"
    save_state(RunningCluster(address="h:1", token="", config="c", grpc="h:77"))
    assert default_target() == "h:77"


def test_state_is_private_and_valid_only_with_its_head(home: Path) -> None:
    state = RunningCluster(address="h:1", token="secret", config="c")
    save_state(state)
    assert load_state() == state
    assert (home / "run" / "cluster.json").stat().st_mode & 0o777 == 0o600
    save_state(RunningCluster(address="h:1", token="", config="c", pid=2**22 + 1, started=5))
    assert load_state() is None
    (home / "run" / "cluster.json").write_text("{}")
    assert load_state() is None
    (home / "run" / "cluster.json").write_text("nonsense")
    assert load_state() is None


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console().table(("NAME", "N"), [("a", 5), ("bcdef", 10)])
    assert capsys.readouterr().out == "NAME    N\na       5\nbcdef  10\n"
    Console().table(("NAME", "N"), [])
    assert capsys.readouterr().out == "NAME  N\n"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from cluster.cli.arguments import make_parser; make_parser()", "ray torch grpc yaml"),
        ("import cluster.serve.deployments, cluster.cli.waiting", "torch triton transformers"),
        ("import cluster.serve.admin, cluster.membership.directory", "torch ray.serve fastapi"),
    ],
    ids=["help", "up", "role"],
)
def test_commands_import_nothing_that_costs_seconds(statement: str, heavy: str) -> None:
    code = f"{statement}; import sys; print(sorted(set({heavy.split()}) & set(sys.modules)))"
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"


def test_a_new_key_comes_with_its_entry_for_the_key_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["keys", "new", "team-a", "--admin"]) == 0
    key_line, _, *entry = capsys.readouterr().out.splitlines()
    key = key_line.rpartition(" ")[2]
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + "\n".join(entry))
    caller = load_keys(path, tiers=frozenset()).caller(f"Bearer {key}")
    assert (caller.name, caller.admin) == ("team-a", True)
    assert key not in path.read_text()


@pytest.mark.parametrize("name", ["", " ", "team ", "a\nb", "\udcff"])
def test_a_key_needs_a_name_that_can_be_shown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = one_line_error(["keys", "new", name], capsys)
    assert code == EXIT_USAGE
    assert f"name must be printable characters without spaces around them, got {name!r}" in error


@pytest.mark.parametrize(
    ("said", "taken_down"),
    [("served", [False]), ("running", [False]), ("draining", [False, True])],
)
def test_two_signals_at_once_do_not_leave_the_cluster_up(
    said: str, taken_down: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    class Signalling(Console):
        def step(self, text: str) -> None:
            if text.startswith((said, "running")):
                for number in numbers:
                    os.kill(os.getpid(), number)

    def take_down(_: None, console: Console, *, now: bool) -> None:
        stopped.append(now)
        console.step("draining")

    for name in ("read_config", "bring_up"):
        monkeypatch.setattr(up_command, name, lambda *_, **__: None)
    monkeypatch.setattr(up_command, "show_endpoints", lambda *_, **__: console.step("served"))
    monkeypatch.setattr(up_command, "take_down", take_down)
    numbers, console = (signal.SIGINT, signal.SIGTERM), Signalling()
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        up_command.run(SimpleNamespace(command="up", foreground=True, config=""), console)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stopped == taken_down
