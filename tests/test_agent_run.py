"""A whole run whose samples are played by a program."""

import sys
from pathlib import Path

import pytest

from runtime.functions import isolation
from tests.support.whole_runs import ROOT, run_topology

EXAMPLES = ROOT / "topologies" / "examples"
AGENT = ROOT / "tests" / "actors" / "rollout" / "sessions" / "two_turns.py"
TOPOLOGY = f"""
include = "{EXAMPLES / "own-recipe.toml"}"
run.name = "agent"

[[data]]
name = "pairs"
path = "{EXAMPLES / "data" / "pairs.jsonl"}"
input_key = "question"
label_key = "answer"
rm_type = "positional_match"

[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
max_response_len = 24
max_context_len = 48

[rollout.agent]
command = ["{sys.executable}", "{AGENT}"]
sandbox = "{"process" if isolation.refusal() else "isolated"}"

[train]
num_steps = 2
"""


@pytest.mark.slow
def test_a_run_trains_on_what_a_program_plays(tmp_path: Path) -> None:
    topology = tmp_path / "agent.toml"
    topology.write_text(TOPOLOGY)
    run = run_topology(tmp_path, topology)
    groups = run.result["groups"]
    assert run.result["steps"] == 2
    assert groups["trained"] == 4
    assert groups["issued"] == sum(number for name, number in groups.items() if name != "issued")
    assert all(row["rollout/response_len/mean"] > 4 for row in run.steps)  # more than one turn
