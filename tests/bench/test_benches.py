"""Every benchmark still runs, most of them nightly: tiny sizes, no figure is judged."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.bench import __main__ as command
from tests.bench.__main__ import BENCHES

ROOT = Path(__file__).parents[2]
SMALL_TAIL = "--steps 4 --warm-up 1 --groups 4 --samples 2 --train-s 0.1 --base-ms 3 --mean 16 --cap 96"
TINY = {
    "ahead": "--case hidden_256 --groups 2 --runs 1 --steps 1",
    "attention": "--tokens 256 --window 32 --samples 4",
    "batches": "--groups 2 --samples 2 --response 8 --times 1",
    "bus": "--messages 64 --repeats 1",
    "delta": "--small --runs 1",
    "delta_net": "--tokens 128 --times 2",
    "demo": "--steps 3 --starts 0",
    "gae": "--samples 4 --tokens 300 --repeats 1",
    "dispatch": "--engines 2 --slots 4 --samples 2 --seconds 1 --spill-every-s 0.5 --token-ms 2 --mean 192 --waves 2",
    "durability": "--groups 20 --tokens 8 --live 64 --decides 2 --burst 0.02",
    "engine": "--seconds 0.2 --no-router --real-rounds 0",
    "judged": "--delay 0.01 --number 64",
    "weight_export": "--small --transport collective --runs 1 --steps 3 --groups 2",
    "ledger": "--events 2000 --big-events 0 --groups 4 --samples 2 --steps 4",
    "long_tail": f"--mode partial {SMALL_TAIL}",
    "lora": "--small --rounds 1 --requests 2 --tokens 8",
    "memory": "--small --case DP2+DO",
    "nodes": "--pairs 1 --steps 4 --delay-ms 5",
    "observed": "--pairs 1 --steps 3",
    "observer": "--events 2000 --live-s 2",
    "pipeline": "--steps 2 --warm-up 1 --groups 8 --samples 4 --mode batched",
    "ray": "--groups 20 --latency-groups 4 --tokens 800 --prompt 20 --turns 1",
    "reward": "--dear 4 --cheap 64 --repeats 1",
    "rooms": "--megabytes 20 --pairs 1 --nodes 2",
    "roster": "--members 8 --idle-s 0.2",
    "samples": "--tokens 512 --streams 2 --spills 2",
    "listener": "--sessions 4 --answer-s 0.2 --seconds 1",
    "save": "--small --runs 1 --pairs 1",
    "sessions": "--turns 16 --messages 20",
    "sglang": "--pairs 1 --groups 2 --response 260",
    "source": "--issues 3 --groups 2 --sizes 16 1000000",
    "step": "--dtype bfloat16 --steps 1 --rounds 1 --seconds 0.01",
    "trainer": "--steps 2 --imports 0",
    "transformers": "--case laptop --runs 1 --steps 1",
    "transports": "--small --runs 1",
    "trl": "--turns 1 --steps 2",
    "weights": "--small --runs 1",
}
NIGHTLY = """
    ahead attention batches delta demo dispatch durability engine judged ledger listener long_tail lora memory
    nodes observed observer pipeline ray reward rooms save sessions sglang source step trainer transformers transports
    trl weight_export weights
""".split()  # over a CPU second each; CI runs the others, and parts of ledger and long_tail below
MARKS: dict[str, Any] = {name: (pytest.mark.nightly, pytest.mark.timeout(900)) for name in NIGHTLY}
MARKS["nodes"] = (*MARKS["nodes"], pytest.mark.nodes)

pytestmark = [pytest.mark.slow]


def run(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=800, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_benchmark_has_a_tiny_size() -> None:
    assert sorted(TINY) == sorted(BENCHES)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in TINY])
def test_a_benchmark_runs_and_prints_json(name: str) -> None:
    assert run(f"tests.bench.bench_{name}", *TINY[name].split())


def test_the_ledger_holds_no_more_memory_the_longer_a_run_is() -> None:
    pure = run("tests.bench.bench_ledger", "--events", "40000", "--big-events", "0", "--steps", "0")["pure"]
    assert pure["rss_mb_at_the_end"] < 1.1 * pure["rss_mb_at_a_quarter"]


@pytest.mark.parametrize("mode", ["partial_stale_1", pytest.param("abort_and_drop", marks=pytest.mark.nightly)])
def test_resumed_samples_lose_no_token_and_dropped_ones_do(mode: str) -> None:
    figures = run("tests.bench.bench_long_tail", "--mode", mode, *SMALL_TAIL.split())["modes"][mode]
    assert figures["halts"] > 0
    assert figures["tokens_not_in_the_log"] == 0
    assert (figures["tokens_discarded"] > 0) == (mode == "abort_and_drop")


def test_the_environment_for_ray_is_the_bench_group_of_pyproject() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["bench"]
    lines = (ROOT / "requirements" / "bench.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == group


def test_a_benchmark_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "nonsense"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 2
    assert "no benchmark nonsense" in done.stderr


def test_results_of_the_command_become_a_dated_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", lambda name: {"us": 3} if name == "bus" else {"error": ["no room"]})
    assert command.main(["--results", str(tmp_path), "bus", "ray"]) == 1
    printed = json.loads(capsys.readouterr().out)
    [page] = tmp_path.iterdir()
    assert (printed["bus"], printed["ray"]) == ({"us": 3}, {"error": ["no room"]})
    assert page.name.endswith("-bench-bus-ray.md")
    assert "| us | 3 |" in page.read_text()
    assert "| error | no room |" in page.read_text()
