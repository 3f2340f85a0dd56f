"""The schema's rules, the shipped topologies, and what is looked for on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from runtime.node.checks.check import not_built
from runtime.settings.derived import eval_data, eval_sampling, max_prompt_len, over_sampling_batch_size
from runtime.settings.load import load_topology
from runtime.settings.placement import data_parallel_size, num_engines, num_ranks
from runtime.settings.topology import decode_topology, encode_topology
from tests.runtime.settings.shipped import COLOCATE, DISAGGREGATE, LAPTOP, ROOT, SHIPPED
from tests.support.checks import checked_here


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.node.checks.machine.gpus_here", lambda: 0)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_topologies_are_valid_and_survive_json(path: Path) -> None:
    topology = load_topology(path).topology
    data = encode_topology(topology)
    assert decode_topology(data) == topology
    assert json.loads(data)["run"]["name"] == topology.run.name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_topology_says_what_is_not_implemented_yet(path: Path) -> None:
    first_lines = " ".join(line.removeprefix("# ") for line in path.read_text().split("\n\n")[0].splitlines()[:3])
    missing = re.search(r"Not implemented yet: ([^#]*?)\.(?: |$)", first_lines)
    named = set(missing[1].split(", ")) if missing else set[str]()
    checked = checked_here(load_topology(path), elsewhere=True)
    assert {problem.key for problem in checked.problems} == named


@pytest.mark.usefixtures("no_gpus")
def test_the_check_says_everything_that_is_not_here() -> None:
    found = [str(problem).partition(": ")[2] for problem in checked_here(load_topology(COLOCATE)).problems]
    assert [line.partition(" (looked in")[0] for line in found] == [
        "nodes.n0.gpus = 8: this machine has 0 GPUs for this process: none, by its environment variables",
        'engines.policy.kind = "sglang": SGLang is not installed in this interpreter: name one that has it with '
        'engines.policy.python; or kind = "tiny", for tiny models',
        'model.hf_checkpoint = "Qwen/Qwen3-4B": no such directory, '
        f"not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids a download; "
        "a directory works too, and bin/import-gguf writes one from a GGUF file",
        'data.0.path = "data/gsm8k/train.jsonl": no such file',
        'eval.0.path = "data/gsm8k/test.jsonl": no such file',
    ]


def test_elsewhere_leaves_out_what_only_that_machine_can_show_and_says_so() -> None:
    checked = checked_here(load_topology(COLOCATE), elsewhere=True)
    assert not checked.problems
    assert checked.left_out == (
        "GPUs (n0: 8)",
        "interpreters and their packages",
        "paths (model.hf_checkpoint, data.0.path, eval.0.path, run.dir)",
        "addresses and ports",
    )


def test_a_start_refuses_what_it_would_not_do() -> None:
    over_nodes = (
        "trainer.gpus=n0:0-3",
        "engines.policy.gpus=n0:4-7,n1:0-3",
        "engines.policy.num_gpus_per_engine=8",
    )
    assert not list(not_built(load_topology(DISAGGREGATE, over_nodes).topology))
    disk = "engines.policy.weight_transport=disk"
    refused = (*over_nodes, "engines.policy.sglang.pp_size=2", "engines.policy.local_copy=true", disk)
    found = {problem.key: problem.message for problem in not_built(load_topology(DISAGGREGATE, refused).topology)}
    assert found == {
        "engines.policy.local_copy": "not implemented yet for an engine over several nodes; allowed: false",
        "engines.policy.sglang.pp_size": (
            "not implemented yet: pipeline stages for an engine over several nodes; allowed: 1"
        ),
    }


def test_a_tensor_parallel_group_over_several_nodes_is_noted() -> None:
    def notes(gpus: str, size: int) -> list[str]:
        ranks = (f"trainer.gpus={gpus}", "engines.policy.gpus=n1:6-7", "rollout.rollout_batch_size=24")
        layout = f"trainer.megatron.tensor_model_parallel_size={size}"
        found = checked_here(load_topology(DISAGGREGATE, (*ranks, layout)), elsewhere=True).notes
        return [note for note in found if "tensor_model_parallel_size" in note]

    (note,) = notes("n0:0-5,n1:0-5", 4)
    assert "ranks 4 to 7 share each layer and are on the nodes n0, n1" in note
    assert not notes("n0:0-5,n1:0-5", 2)


@pytest.mark.usefixtures("no_gpus")
def test_gpus_asked_where_none_is_stop_a_start_on_that_node() -> None:
    found = [str(problem) for problem in checked_here(load_topology(COLOCATE), node="n0").problems]
    assert (
        f"{COLOCATE}: nodes.n0.gpus = 8: this machine has 0 GPUs for this process: none, by its environment variables"
        in found
    )


def test_sizes_follow_from_the_layout() -> None:
    topology = load_topology(COLOCATE).topology
    assert num_ranks(topology.trainer) == 8
    assert data_parallel_size(topology.trainer) == 4
    assert num_engines(topology.engines["policy"]) == 8
    assert over_sampling_batch_size(topology.rollout) == 64
    assert over_sampling_batch_size(load_topology(LAPTOP).topology.rollout) == 64
    assert max_prompt_len(load_topology(LAPTOP, ("rollout.max_prompt_len=none",)).topology.rollout) is None
    overrides = ("rollout.max_prompt_len=none", "rollout.max_context_len=64")
    assert max_prompt_len(load_topology(LAPTOP, overrides).topology.rollout) == 63


def test_evaluation_takes_what_it_does_not_say_from_the_rollout_and_the_first_source() -> None:
    topology = load_topology(LAPTOP).topology
    sampling, data = eval_sampling(topology, topology.eval[0]), eval_data(topology, topology.eval[0])
    assert (sampling.temperature, sampling.top_p, sampling.max_response_len) == (0.0, 1.0, 4)
    assert (data.label_key, data.rm_type, data.apply_chat_template) == ("label", "exact_match", True)


def test_recipe_a_is_as_measured() -> None:
    topology = load_topology(LAPTOP).topology
    rollout, algorithm, optimizer = topology.rollout, topology.algorithm, topology.optimizer
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.max_response_len) == (64, 8, 4)
    assert (algorithm.loss.eps_clip, algorithm.loss.eps_clip_high, algorithm.num_steps_per_rollout) == (0.2, 0.28, 2)
    assert (algorithm.entropy_coef, algorithm.entropy_coef_end, topology.train.num_steps) == (0.1, 0.0, 200)
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (3e-3, 0.9, 0.95, 0.0)
    assert algorithm.use_rollout_logprobs
    assert algorithm.reduction.type


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), False),
        (("train.max_tokens_per_gpu=10",), True),
        (("train.max_tokens_per_gpu=10", "run.only='rollout'"), False),
        (("train.max_tokens_per_gpu=18", "rollout.max_context_len=18"), False),
    ],
)
def test_lengths_that_no_rank_takes_are_told(overrides: tuple[str, ...], told: bool) -> None:
    """The laptop's recipe allows prompts and responses of over 10 tokens together."""
    notes = checked_here(load_topology(LAPTOP, overrides), elsewhere=True).notes
    assert any("train.on_too_long" in note for note in notes) is told


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), ""),
        (("rollout.top_p=0.9",), "return_sampling_mask = true takes both over the kept tokens; it needs rollout.top_k"),
        (("rollout.top_k=8",), "return_sampling_mask = true takes both over the kept tokens"),
        (("rollout.top_p=0.9", "rollout.top_k=8", "rollout.return_sampling_mask=true"), ""),
    ],
)
def test_log_probs_of_another_distribution_than_the_sampled_one_are_told(overrides: tuple[str, ...], told: str) -> None:
    notes = [note for note in checked_here(load_topology(LAPTOP, overrides), elsewhere=True).notes if "top_" in note]
    assert len(notes) == bool(told)
    assert all(note.endswith(told) or told in note for note in notes)


def test_checking_a_topology_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.settings.load import load_topology; "
        "from runtime.node.checks.check import check_here; from runtime.node.checks.context import CheckContext; "
        f"check_here(CheckContext(load_topology(Path({str(LAPTOP)!r})))); "
        "print(sorted({'torch', 'nats', 'transformers', 'anyio'} & set(sys.modules)), len(sys.modules))"
    )
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=200)
    heavy, _, number = result.stdout.decode().strip().rpartition(" ")
    assert heavy == "[]"
    assert int(number) < 450  # 351 in 2026, of which numpy, of the messages, has 86


def test_the_schema_has_no_mutable_table() -> None:
    topology = load_topology(LAPTOP).topology
    with pytest.raises(AttributeError):
        topology.run.name = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(topology.run, name="x").name == "x"
