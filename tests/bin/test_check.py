"""`--check` says yes exactly where a start trains a step: a table of topologies, each checked and each started.

Those that are refused are started in this process, which must end with the same words before anything is made; those
that are accepted are started as a person would.
"""

import json
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import actors.preflight  # noqa: F401 - here once, not in the process of each check
from actors.trainer.checkpoints import METADATA_FILE, SavedRun, directory_of
from actors.trainer.checkpoints import RUN_FILE as SAVED_FILE
from actors.trainer.file_checksums import write_checksums
from actors.trainer.models.config import read_hf_config
from bin.start_topology import main
from runtime.bus.bus import Bus
from runtime.bus.nats.server import server_command, wait_ready
from runtime.data.dump_files import RUN_FILE
from runtime.models.checkpoint_files import CHECKPOINTS
from runtime.node.claims.claim import Claim
from runtime.node.claims.run_id import KEY, IdOnBus
from runtime.settings.tables.trainer import MegatronConfig
from runtime.util.files import write_atomically
from runtime.util.secrets import Login, Secret, with_login
from tests.bin.check_cases import (
    ACCEPTED,
    COLOCATE,
    DISAGGREGATE,
    GENERATES,
    GRADER,
    LAPTOP,
    MODEL,
    REFUSED,
    ROOT,
    SFT,
    TINY,
    Case,
)
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS

TRAINED_ELSEWHERE = (
    *("as shipped", "turns in the same memory", "demonstrations", "a copy by broadcast"),
    *("tensor and sequence parallel", "a bus that is there"),
)


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Broken and unusual files that the table names as TMP/..."""
    folder = tmp_path_factory.mktemp("things")
    (folder / "graders.py").write_text(GRADER)
    for password in ("right", "wrong"):
        write_atomically(folder / f"{password}.toml", f'user = "me"\npassword = "{password}"\n'.encode())
    (folder / "torn.jsonl").write_text('{"input": "12", "label": "21"}\n{"input": "1\n')
    (folder / "named.jsonl").write_text('{"input": "12", "label": "21", "metadata": {"rm_type": "nonsense"}}\n')
    for name in ("bare", "broken", "plain", "more"):
        shutil.copytree(MODEL, folder / name)
    (folder / "bare/tokenizer.json").unlink()
    (folder / "broken/tokenizer.json").write_text("{}")
    (folder / "plain/tokenizer_config.json").write_text("{}")
    tokenizer = json.loads((MODEL / "tokenizer.json").read_bytes())
    tokenizer["model"]["vocab"]["a"] = 99
    (folder / "more/tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((MODEL / "config.json").read_bytes())
    moe: dict[str, object] = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    moe |= {"num_experts_per_tok": 2, "num_hidden_layers": 2}
    changes: dict[str, dict[str, object]] = {
        "mixtral": {"model_type": "mixtral"},
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "unmasked": {"is_causal": False},
        "biased": {"attention_bias": True},
        "few": {"vocab_size": 8},
        "texts": {"hidden_size": "32"},
        "dense-layer": {**moe, "mlp_only_layers": [1]},
        "dense-layers": {**moe, "decoder_sparse_step": 2},
        "other": {},
        "holes": {},
    }
    for name, change in changes.items():
        shutil.copytree(MODEL, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | change))
    save_file({"model.embed_tokens.weight": np.zeros((8, 8), np.float32)}, folder / "other/model.safetensors")
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, folder / "holes/model.safetensors")
    saved = directory_of(folder / "saved" / CHECKPOINTS, step=3, incarnation=1)
    saved.mkdir(parents=True)
    (saved / METADATA_FILE).touch()
    said = SavedRun(
        run="saved",
        step=3,
        frontier=3,
        steps_before=0,
        incarnation=1,
        dtype="float32",
        model=read_hf_config(folder / "few"),
        num_processes=1,
        megatron=MegatronConfig(),
        use_distributed_optimizer=False,
        has_checksums=True,
    )
    (saved / SAVED_FILE).write_bytes(msgspec.json.encode(said))
    write_checksums(saved, {})
    (folder / "dumped").mkdir()
    (folder / "dumped" / RUN_FILE).write_text('{"run": "somebody", "began": "2026"}')
    return folder


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    """The port of a server that runs beside the test."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield str(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def greeting(line: bytes) -> Iterator[str]:
    """The port of a server that says one line to whoever connects."""

    class Greeter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(line)

    with serving(socketserver.TCPServer(("127.0.0.1", 0), Greeter)) as port:
        yield port


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The port of a server that asks for a login: `me` has a log, with streams of another run; `few` may not
    delete streams; `bare` has no log."""
    folder = tmp_path_factory.mktemp("locked")
    me = Login(user="me", password=Secret("right"))
    config = folder / "nats.conf"
    config.write_text(
        "host: 127.0.0.1\nport: -1\nmax_payload: 8388608\n"
        f'jetstream {{ store_dir: "{folder}" }}\n'
        "accounts {\n"
        "  LOG { jetstream: enabled, users: [{ user: me, password: right }, { user: few, password: right,\n"
        '    permissions: { publish: { allow: ">", deny: "$JS.API.STREAM.DELETE.>" } } }] }\n'
        "  NONE { users: [{ user: bare, password: right }] }\n"
        "}\n"
    )

    async def occupied(pid: int) -> str:
        ports = await wait_ready(folder, pid, timeout_s=10, login=me)
        async with Bus.connect(with_login(ports.url, me), "checked", name="test", limits=TEST_LIMITS) as bus:
            await bus.ensure_streams(TEST_STREAMS)
            await bus.kv.create(KEY, IdOnBus(id="another", owned=True, made_in="/there on host"))
        return str(ports.port)

    with (
        (folder / "nats.log").open("wb") as log,
        subprocess.Popen(server_command(config, folder), stdout=log, stderr=log) as server,
    ):
        try:
            yield anyio.run(occupied, server.pid)
        finally:
            server.kill()


@contextmanager
def saying(**says: object) -> Iterator[str]:
    """The port of an engine that says this of itself."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(says).encode())

        def log_message(self, *_: object) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


@pytest.fixture(scope="module")
def ports(locked: str) -> Iterator[dict[str, str]]:
    """Ports by the names that the table gives them; nobody who asks there leaves anything behind."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.socket() as free,
        greeting(b'INFO {"server_id": "x", "max_payload": 8388608}\r\n') as plain,
        greeting(b"220 mail.example ESMTP\r\n") as other,
        saying(dtype="bfloat16") as bfloat,
    ):
        free.bind(("127.0.0.1", 0))  # and does not listen
        known = {"TAKEN": taken, "FREE": free}
        yield {name: str(it.getsockname()[1]) for name, it in known.items()} | {
            "PLAIN": plain, "OTHER": other, "LOCKED": locked, "BFLOAT": bfloat,
        }  # fmt: skip


def arguments(case: Case, things: Path, run_dir: Path, ports: dict[str, str]) -> list[str]:
    tiny = () if case.file in (COLOCATE, DISAGGREGATE) else TINY if case.file == SFT else (*TINY, *GENERATES)
    words = [*tiny, f"run.dir={run_dir}", "run.name=checked", *case.overrides]
    for name, value in {"TMP": str(things), **ports}.items():
        words = [word.replace(name, value) for word in words]
    return [str(case.file), *(part for word in words for part in ("--set", word))]


@pytest.mark.parametrize("more", [(), ("--check",)], ids=["start", "check"])
def test_a_start_names_the_setting_with_which_log_probs_are_those_of_the_sampled_distribution(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file ends both before anything starts."""
    settings = ("rollout.top_p=0.9", "rollout.top_k=8", f"run.dir={tmp_path}", f"data.0.path={tmp_path}/none.jsonl")
    assert main([str(LAPTOP), *(part for one in settings for part in ("--set", one)), *more]) == 2
    told = capsys.readouterr()
    (note,) = (line for line in f"{told.out}{told.err}".splitlines() if line.startswith("note: rollout.top_p"))
    assert "rollout.return_sampling_mask = true takes both over the kept tokens" in note


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_start_refuses_is_refused_by_the_check_with_the_same_words(
    name: str, things: Path, tmp_path: Path, ports: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    case, run_dir = REFUSED[name], tmp_path / "runs"
    command = arguments(case, things, run_dir, ports)
    assert main([*command, "--check"]) == 2
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if not line.startswith("note: ")]
    assert told.out == ""
    words = case.words
    for place, port in ports.items():
        words = words.replace(place, port)
    assert any(f": {case.key}" in line and words in line for line in lines), lines
    assert main(command) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")] == lines
    assert not run_dir.exists()


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_trains_is_accepted(
    name: str, things: Path, tmp_path: Path, ports: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    make_parquet(things)
    code = main([*arguments(ACCEPTED[name], things, tmp_path, ports), "--check"])
    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    assert told.out == f"{ACCEPTED[name].file}: valid; the run can start on this machine\n"


def test_an_engine_that_serves_what_is_asked_for_is_accepted(
    things: Path, tmp_path: Path, ports: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with saying(architectures=["Qwen3ForCausalLM"], dtype="float32", dp_size=1, max_req_input_len=58) as port:
        case = Case((f"engines.policy.urls=['http://127.0.0.1:{port}']",))
        code = main([*arguments(case, things, tmp_path, ports), "--check"])
    assert (code, capsys.readouterr().err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in TRAINED_ELSEWHERE else ()) for name in ACCEPTED]
)
def test_what_is_accepted_trains_a_step(name: str, things: Path, tmp_path: Path, ports: dict[str, str]) -> None:
    make_parquet(things)
    command = [
        sys.executable,
        str(ROOT / "bin/physarum.py"),
        "start-topology",
        *arguments(ACCEPTED[name], things, tmp_path, ports),
    ]
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1


def make_parquet(things: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"input": str(number), "label": str(number)[::-1]} for number in (12, 34)]
    parquet.write_table(pa.Table.from_pylist(rows), things / "rows.parquet")


@pytest.mark.parametrize(
    ("package", "overrides", "key", "extra"),
    [
        ("torch", (), "trainer.device", "trainer"),
        ("megatron.core", (), "trainer.device", "trainer"),
        ("torch", (), "engines.policy.kind", "engine"),
        ("sglang_router", ("engines.policy.router=sglang-router",), "engines.policy.router", "router"),
        ("pyarrow", ("data.0.path=TMP/rows.parquet",), "data.0.path", "parquet"),
    ],
)
def test_what_is_not_installed_is_refused(
    package: str,
    overrides: tuple[str, ...],
    key: str,
    extra: str,
    things: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_parquet(things)
    if package == "pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(
        "runtime.node.checks.machine.find_spec", lambda name: None if name == package else find_spec(name)
    )
    command = arguments(Case(overrides), things, tmp_path / "runs", {})
    for words in ([*command, "--check"], command):
        assert main(words) == 2
        assert any(
            f": {key} = " in line and package in line and f"[{extra}]" in line
            for line in capsys.readouterr().err.splitlines()
        )
    assert main([*command, "--check", "--elsewhere"]) == 0


def test_elsewhere_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(LAPTOP), "--check", "--elsewhere", "--set", "data.0.path=no/such", "--set", "nodes.local.gpus=99"]
    assert main(words) == 0
    assert capsys.readouterr().out == (
        f"{LAPTOP}: valid, except for what only the machine of the run can show; not checked: GPUs (local: 99); "
        "interpreters and their packages; paths (model.hf_checkpoint, data.0.path, eval.0.path, run.dir); "
        "addresses and ports\n"
    )
    url = "http://127.0.0.1:9"
    assert main([*words, "--set", f'engines.policy.urls=["{url}"]']) == 0
    assert capsys.readouterr().out.endswith(f"ports; models of external engines ({url})\n")
    assert main([str(LAPTOP), "--elsewhere"]) == 2
    assert "--elsewhere needs --check" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings", [(), ("engines.policy.weight_format=fp8",), ("engines.policy.weight_transport=disk",)]
)
@pytest.mark.parametrize("name", ["single-gpu.toml", "colocate-8gpu.toml", "disaggregate-8gpu.toml"])
def test_topologies_of_gpus_would_start_where_there_are_some(name: str, settings: tuple[str, ...]) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    assert main([str(ROOT / "topologies" / name), "--check", "--elsewhere", *words]) == 0


def test_a_plan_is_drawn_wherever_one_is_and_says_what_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DISAGGREGATE), "--plan"]) == 0
    told = capsys.readouterr()
    assert "engine.policy.0-7" in told.out
    assert f"note: the run cannot start here as node n0: {DISAGGREGATE}: nodes" in told.err


def test_a_run_that_is_running_is_not_said_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(Case(()), tmp_path, tmp_path, {})
    with Claim.take(tmp_path / "checked"):
        assert main([*command, "--check"]) == 2
        told = capsys.readouterr().err
        assert "is in use" in told
        assert main(command) == 2
        assert capsys.readouterr().err == told


def test_a_run_of_another_recipe_is_not_said_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from runtime.node.claims.rundir import prepare
    from runtime.settings.load import load_topology

    command = arguments(Case(()), tmp_path, tmp_path, {})
    with Claim.take(tmp_path / "checked") as claim:
        prepare(claim, load_topology(LAPTOP, (*command[2::2], "rollout.temperature=0.5")).topology)
    assert main([*command, "--check"]) == 2
    told = capsys.readouterr().err
    assert "rollout.temperature: 0.5 → 1.0" in told
    assert main(command) == 2
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("content", "able"),
    [(None, "the last release that continues it is 0.1.0"), ("3\n", "only the version that began it does")],
)
def test_a_run_of_another_format_is_neither_resumed_nor_said_to(
    content: str | None, able: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runtime.node.claims.rundir import FORMAT_FILE, prepare
    from runtime.settings.load import load_topology

    command = arguments(Case(()), tmp_path, tmp_path, {})
    run_dir = tmp_path / "checked"
    with Claim.take(run_dir) as claim:
        prepare(claim, load_topology(LAPTOP, tuple(command[2::2])).topology)
    assert main([*command, "--check"]) == 0
    if content is None:
        (run_dir / FORMAT_FILE).unlink()
    else:
        (run_dir / FORMAT_FILE).write_text(content)
    capsys.readouterr()
    for each in ([*command, "--check"], command):
        assert main(each) == 2
        told = capsys.readouterr().err
        assert (
            f"holds a run of format '{(content or '1').strip()}', and this version continues format 2; {able}" in told
        )
        assert told.count("\n") == 1
    assert main([*command, "--check", "--fresh", "checked"]) == 0


def test_a_checkpoint_of_an_earlier_version_is_not_said_to_resume(
    things: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = directory_of(Path(CHECKPOINTS), step=3, incarnation=1)
    shutil.copytree(things / "saved" / saved, tmp_path / "checked" / saved)
    file = tmp_path / "checked" / saved / SAVED_FILE
    said = msgspec.json.decode(file.read_bytes(), type=SavedRun)
    command = [*arguments(Case(()), tmp_path, tmp_path, {}), "--check"]
    for has_checksums, code in ((True, 0), (False, 2)):
        of_model = msgspec.structs.replace(said, model=read_hf_config(MODEL), has_checksums=has_checksums)
        file.write_bytes(msgspec.json.encode(of_model))
        assert main(command) == code
    assert "step-00000003 was written by an earlier version of the trainer" in capsys.readouterr().err


def test_rows_that_run_programs_need_an_isolated_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = {"inputs": ["1"], "outputs": ["1"]}
    row = {"input": "12", "label": label, "metadata": {"rm_type": "code"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    changes = (f"data.0.path={tmp_path / 'rows.jsonl'}", "eval=[]", f"run.dir={tmp_path}", "run.check_timeout_s=100")
    assert main([str(LAPTOP), "--check", *(part for change in changes for part in ("--set", change))]) == 2
    assert 'row 0: the grader code needs reward.sandbox = "isolated": it runs' in capsys.readouterr().err


def test_rows_may_name_graders_of_the_topology_and_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    (tmp_path / "graders.py").write_text(GRADER)
    rows = [{"input": "12", "label": "21", "metadata": {"rm_type": name}} for name in ("mine", "positional_match")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = (f"data.0.path={tmp_path / 'rows.jsonl'}", "eval=[]", f"run.dir={tmp_path}")
    command = [str(LAPTOP), "--check", *(part for change in changes for part in ("--set", change))]
    assert main(command) == 2
    assert "no grader 'mine'" in capsys.readouterr().err
    assert main([*command, "--set", f"reward.graders.mine={tmp_path / 'graders.py'}:grade"]) == 0
    external = ("--set", 'reward.external=["mine"]', "--set", f"bus.url={url}")
    assert main([*command, *external]) == 0
    assert main([*command, *external, "--set", "data.0.rm_type=mine"]) == 0


def test_isolation_is_asked_of_the_machine_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.functions.isolation.refusal", lambda: "unshare: Operation not permitted")
    command = [str(LAPTOP), "--check", "--set", "reward.sandbox=isolated"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert 'reward.sandbox = "isolated": this machine cannot isolate graders: unshare: Operation not permitted' in said
    assert main([*command, "--elsewhere"]) == 0
