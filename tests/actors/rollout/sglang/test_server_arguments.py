"""What a pool gives to SGLang's server is compared with the server's own list, and reaches it in its types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.preflight import preflight
from actors.processes import process_specs
from actors.rollout.sglang.server_arguments import engine_problems
from bin.start_topology import main
from runtime.node.checks.context import CheckContext
from runtime.settings.load import load_topology
from runtime.settings.processes import with_address
from runtime.settings.tables.engines import EngineConfig
from tests.support.fake_sglang import times_imported, write_fake_sglang

ROOT = Path(__file__).resolve().parents[4]
LAPTOP = ROOT / "topologies" / "laptop.toml"

TYPED: dict[str, Any] = {
    "mem_fraction_static": 0.5,
    "dtype": "float32",
    "lora-target-modules": ["q_proj", "k_proj"],
    "cuda_graph_bs": [1, 2],
    "json_model_override_args": {"rope": {"factor": 2.0}},
    "preferred_sampling_params": {"top_p": 0.9},
    "sidecar_args": ["--a", 1],
    "graph_backend": "any",
    "enable_lora": True,
    "incremental_streaming_output": False,
    "dllm_fdfo": False,
    "tensor_parallel_size": 2,
}

HELP = "; allowed: those of sglang.launch_server --help"


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return write_fake_sglang(tmp_path / "site")


def problems(fake: Path, cache: Path, **arguments: Any) -> list[str]:
    engine = EngineConfig(python=sys.executable, env={"PYTHONPATH": str(fake)}, sglang=arguments)
    return [str(problem) for problem in engine_problems("engines.policy", engine, cache=cache)]


def test_arguments_that_the_server_takes_are_accepted(fake: Path, tmp_path: Path) -> None:
    assert problems(fake, tmp_path, **TYPED) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mem_fraction_statik", 0.5, "SGLang 0.5.23 has no such argument, did you mean mem_fraction_static?" + HELP),
        ("zzz", 1, "SGLang 0.5.23 has no such argument" + HELP),
        ("mem_fraction_static", "half", "allowed: a float"),
        ("tp_size", 1.5, "allowed: an int"),
        ("tp_size", True, "allowed: an int"),
        ("enable_lora", "yes", "allowed: true or false"),
        ("dtype", "float31", "allowed: one of 'auto', 'float32'"),
        ("lora_target_modules", ["q_proj", "x"], "allowed: a list, each one of 'k_proj', 'q_proj'"),
        ("cuda_graph_bs", [1, "two"], "allowed: a list, each an int"),
        ("preferred_sampling_params", "{", "allowed: a table or a list"),
        ("json_model_override_args", 3, "allowed: a string"),
    ],
)
def test_an_argument_that_the_server_would_refuse_is_named_with_what_is_allowed(
    name: str, value: object, said: str, fake: Path, tmp_path: Path
) -> None:
    assert problems(fake, tmp_path, **{name: value}) == [f"engines.policy.sglang.{name} = {json.dumps(value)}: {said}"]


def test_the_server_is_asked_once_for_each_version(fake: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert problems(fake, tmp_path / "cache") == []
    assert times_imported(fake) == 1
    write_fake_sglang(fake, "0.4.0")
    (said,) = problems(fake, tmp_path / "cache")
    assert times_imported(fake) == 2
    assert said == f'engines.policy.python = "{sys.executable}": has SGLang 0.4.0; allowed: 0.5.23'


def test_a_server_that_cannot_be_imported_says_why(fake: Path, tmp_path: Path) -> None:
    (fake / "sglang" / "srt" / "server_args.py").write_text("import no_such_kernel")
    (said,) = problems(fake, tmp_path)
    assert said.endswith(
        "the arguments of this SGLang cannot be read: ModuleNotFoundError: No module named 'no_such_kernel'"
    )


def overrides(fake: Path, *more: str) -> list[str]:
    pool = f'kind="sglang", concurrency=8, python="{sys.executable}", env={{PYTHONPATH="{fake}"}}'
    return [f"engines.policy={{{pool}}}", *more]


def check(*words: str) -> int:
    words = ("run.name=test-arguments", *words)  # runs/laptop may hold a run with another recipe
    return main([str(LAPTOP), "--check", *(part for word in words for part in ("--set", word))])


def test_the_check_tells_and_elsewhere_does_not_ask(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check(*overrides(fake)) == 0, capsys.readouterr().err
    wrong = overrides(fake, "engines.policy.sglang.mem_fraction_statik=0.5")
    assert check(*wrong) == 2
    assert (
        "--set: engines.policy.sglang.mem_fraction_statik = 0.5: SGLang 0.5.23 has no such argument, "
        "did you mean mem_fraction_static?"
    ) in capsys.readouterr().err
    assert len(list((tmp_path / "physarum" / "server-arguments").iterdir())) == 1
    assert preflight(CheckContext(load_topology(LAPTOP, wrong), elsewhere=True)).problems == ()


def test_the_server_gets_every_argument_in_its_type_and_the_environment_of_its_pool(fake: Path, tmp_path: Path) -> None:
    given = [f"engines.policy.sglang.{name}={toml(value)}" for name, value in TYPED.items()]
    marked = 'engines.policy.env.MARKED="two words"'
    topology = load_topology(LAPTOP, overrides(fake, marked, *given)).topology
    (spec,) = [spec for spec in process_specs(topology, "local", tmp_path) if spec.name == "engine.policy.0"]
    words = [with_address(word, "127.0.0.1", 1) for word in spec.command]
    done = subprocess.run(words, env=dict(spec.env), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    expected: dict[str, Any] = {name.replace("-", "_"): value for name, value in TYPED.items()}
    expected["tp_size"] = expected.pop("tensor_parallel_size")
    expected["json_model_override_args"] = json.dumps(expected["json_model_override_args"])
    assert {name: got["args"][name] for name in expected} == expected
    assert got["marked"] == "two words"


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)
