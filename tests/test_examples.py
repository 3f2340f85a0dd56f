"""topologies/examples: each trains as a user starts it, and the functions that it names really run."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.whole_runs import START, advice_in

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "topologies" / "examples"
TOKENIZER = ROOT / "topologies" / "demo" / "models" / "reverse-digits" / "tokenizer.json"
NUM_STEPS = 2
ADVISED_STEPS = 24  # more than any rule of advice looks at
LIMIT_S = 600
ADVISED_LIMIT_S = 1_200  # a loaded machine takes several minutes


@dataclass(frozen=True)
class Done:
    """A run that finished: its result, its rows of metrics, and where its dump and its directory are."""

    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    dump: Path
    run_dir: Path

    def samples(self) -> list[dict[str, Any]]:
        """All dumped samples."""
        files = (self.dump / f"rollout_{step}.jsonl" for step in range(NUM_STEPS + 1))
        return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


@contextmanager
def engine_server() -> Generator[str]:
    """The server of the example another-engine, on a free port. Yields its address."""
    command = [sys.executable, str(EXAMPLES / "another_engine_server.py"), str(TOKENIZER.parent), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as it:
        try:
            assert it.stdout is not None
            yield it.stdout.readline().strip()
        finally:
            it.kill()


def run(name: str, place: Path, num_steps: int = NUM_STEPS, limit_s: float = LIMIT_S) -> Done:
    with engine_server() if name == "another-engine" else nullcontext("") as server:
        return run_with(name, place, {"ANOTHER_ENGINE": server} if server else {}, num_steps, limit_s)


def run_with(name: str, place: Path, env: dict[str, str], num_steps: int, limit_s: float) -> Done:
    command = [*START, str(EXAMPLES / f"{name}.toml"), "--json"]
    command += ["--set", f"train.num_steps={num_steps}", "--set", "run.dump_details=dump"]
    done = subprocess.run(
        command,
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run_dir = place / "runs" / name
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Done(json.loads(done.stdout), metrics, place / "dump", run_dir)


def dpo(done: Done) -> None:
    assert [row["train/preference_loss"] > 0 for row in done.metrics if "train/preference_loss" in row] == [True] * 2
    evaluated = [(row["eval/step"], 0 <= row["eval/held-out"] <= 1) for row in done.metrics if "eval/step" in row]
    assert evaluated == [(0, True), (2, True)]
    assert (done.run_dir / "hf" / "model.safetensors").is_file()
    assert sorted({(sample["part"], sample["reward"]) for sample in done.samples()}) == [(0, 1.0), (1, 0.0)]


def rm(done: Done) -> None:
    dpo(done)
    losses = [row["train/loss"] for row in done.metrics if "train/loss" in row]
    assert losses[0] == pytest.approx(np.log(2), abs=0.2)  # random weights, whose rewards are near 0
    config = json.loads((done.run_dir / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]


def own_recipe(done: Done) -> None:
    samples = done.samples()
    assert len(samples) == NUM_STEPS * 8 * 16
    assert {sample["data"] for sample in samples} == {"pairs"}
    assert samples[0]["prompt"] == f"<user>{samples[0]['label'][::-1]}<assistant>"


def own_reward(done: Done) -> None:
    for sample in done.samples():
        assert sample["reward"] == sample["score"]["score"]
        if sample["status"] == "truncated":
            assert sample["score"] == {"score": 0.0, "right_digits": 0}
        elif len(sample["response"]) == 2:
            right = sum(ours == theirs for ours, theirs in zip(sample["response"], sample["label"], strict=True))
            assert sample["score"] == {"score": 0.5 + 0.25 * right, "right_digits": right}
    rewards = {sample["reward"] for sample in done.samples()}
    assert rewards >= {0.0, 0.5}


def own_filter(done: Done) -> None:
    groups: dict[int, list[dict[str, Any]]] = {}
    for sample in done.samples():
        groups.setdefault(sample["group_id"], []).append(sample)
    for group in groups.values():
        has_contrast = len({sample["reward"] for sample in group}) > 1
        expected = ("keep", None) if has_contrast else ("drop", "no_contrast")
        assert {(sample["verdict"], sample["verdict_reason"]) for sample in group} == {expected}
    dropped = sum(group[0]["verdict"] == "drop" for group in groups.values())
    assert 0 < dropped <= done.result["groups"]["dropped"]


def tool_use(done: Done) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    called = 0
    for sample, segments in with_segments(done):
        if sample["sample_metadata"].get("tool_calls") is None:
            assert len(segments) == 1
            assert sample["score"]["tool_calls"] == 0
            assert sample["reward"] <= 0.5  # only a call that the tool answers gets more
            continue
        called += 1
        first, second = sample["segment_texts"][0][-3:-1]
        prompt, turn = segments[1]
        given = tokenizer.decode(prompt, skip_special_tokens=False).replace(" ", "")
        assert given == f"<user>{int(first) + int(second):02}<assistant>"  # an input: it has no log-probs and no mask
        assert len(turn) > 0
        assert sample["score"]["tool_calls"] == 1
        assert sample["reward"] >= (0.5 if sample["segment_texts"][0] == sample["prompt"][6:8] + "}" else 0)
    assert called > 0


def environment(done: Done) -> None:
    """Two conversations a sample, each with its own context and a reward that no grader gave."""
    samples = list(with_segments(done))
    firsts = [(sample, segments) for sample, segments in samples if sample["part"] == 0]
    helpers = [(sample, segments) for sample, segments in samples if sample["part"] == 1]
    assert len(firsts) == len(helpers) == NUM_STEPS * 8 * 16
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for sample, segments in helpers:
        (prompt, _), shown = segments[0], sample["sample_metadata"]["asked"]
        assert tokenizer.decode(prompt, skip_special_tokens=False).replace(" ", "") == f"<user>{shown}<assistant>"
    assert {sample["score"] is None for sample, _ in samples} == {True}
    assert [row["rollout/own_reward_ratio"] for row in done.metrics if row.get("step")] == [1.0] * NUM_STEPS


def with_segments(done: Done) -> Iterator[tuple[dict[str, Any], list[tuple[list[int], list[int]]]]]:
    """Each dumped sample with its segments, as (prompt ids, response ids)."""
    for step in range(NUM_STEPS):
        lines = (done.dump / f"rollout_{step}.jsonl").read_text().splitlines()
        columns = np.load(done.dump / f"rollout_{step}.npz")
        for number, line in enumerate(lines):
            begin, end = columns["sample_offsets"][number : number + 2]
            yield json.loads(line), [tokens_of(columns, segment) for segment in range(begin, end)]


def tokens_of(columns: Any, segment: int) -> tuple[list[int], list[int]]:
    """Prompt ids and response ids of a segment; all of the latter are the model's, and train."""
    prompt, response = (
        slice(*columns[f"{what}_offsets"][segment : segment + 2].tolist()) for what in ("prompt", "response")
    )
    assert columns["loss_mask"][response].all()
    return columns["prompt_ids"][prompt].tolist(), columns["response_ids"][response].tolist()


def another_engine(done: Done) -> None:
    """Its server has the trainer's weights in each step, and says by which log-probs it sampled."""
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in done.metrics if row.get("step")]
    assert len(differences) == NUM_STEPS
    assert max(differences) < 1e-5
    samples = list(with_segments(done))
    assert len(samples) == NUM_STEPS * 8 * 16
    for sample, ((_, response),) in samples:
        assert (response[-1] == 1) == (sample["status"] == "completed")  # 1 is the end token
        assert len(response) == 4 or response[-1] == 1


def sft(done: Done) -> None:
    processes = {path.stem for path in (done.run_dir / "logs").glob("*.jsonl")}
    assert not [name for name in processes if name.startswith(("engine", "router", "reward"))]
    assert (done.run_dir / "hf" / "model.safetensors").exists()
    losses = [row["train/loss"] for row in done.metrics if row["step"] > 0]
    assert losses[0] == pytest.approx(np.log(16), abs=0.1)  # 16 tokens, random weights
    assert losses[1] < losses[0]


CHECKS: dict[str, Callable[[Done], None]] = {
    "another-engine": another_engine,
    "own-filter": own_filter,
    "dpo": dpo,
    "environment": environment,
    "own-recipe": own_recipe,
    "own-reward": own_reward,
    "rm": rm,
    "sft": sft,
    "tool-use": tool_use,
}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", CHECKS)
def test_an_example_trains_with_its_own_functions(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    groups = done.result["groups"]
    assert done.result["steps"] == NUM_STEPS
    assert groups["trained"] == NUM_STEPS * {"sft": 16, "dpo": 128, "rm": 128, "tool-use": 32}.get(name, 8)
    assert groups["issued"] == sum(count for state, count in groups.items() if state != "issued")
    CHECKS[name](done)


@pytest.mark.nightly
@pytest.mark.timeout(ADVISED_LIMIT_S + 60)
@pytest.mark.parametrize("name", CHECKS)
def test_an_example_gets_no_advice_in_its_first_steps(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path, ADVISED_STEPS, ADVISED_LIMIT_S)
    assert done.result["steps"] == ADVISED_STEPS
    assert advice_in(done.run_dir) == {}


def test_the_calculator_answers_although_its_process_was_killed() -> None:
    tools = runpy.run_path(str(EXAMPLES / "tool_use.py"))["Tools"]()
    try:
        for _ in range(2):
            assert tools.evaluate("'%02d' % (int('4') + int('7'))") == "11"
            tools.process.kill()
            tools.process.wait()
        assert tools.evaluate("open('/etc/passwd')") == "NameError"
    finally:
        tools.process.kill()
        tools.process.communicate()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("47}<user>11<assistant>11", 1.0),
        ("47}<user>11<assistant>12", 0.75),
        ("47}<user>11<assistant>", 0.5),
        ("74}<user>11<assistant>11", 1 / 6),  # the brace alone is right: the answer is not graded
        ("47", 1 / 3),
        ("11", 0.0),  # the answer without the tool
        ("", 0.0),
    ],
)
def test_an_answer_counts_after_the_right_call_alone(response: str, score: float) -> None:
    sample = SimpleNamespace(prompt="<user>47<assistant>", response=response, label="11")
    assert runpy.run_path(str(EXAMPLES / "tool_use.py"))["reward"](sample)["score"] == pytest.approx(score)


def test_every_example_is_run_and_described() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.toml")) == sorted(CHECKS)
    listed = [
        line.split("](")[1].split(")")[0]
        for line in (EXAMPLES / "README.md").read_text().splitlines()
        if line.startswith("| [")
    ]
    assert sorted(listed) == sorted(f"{name}.toml" for name in CHECKS)
