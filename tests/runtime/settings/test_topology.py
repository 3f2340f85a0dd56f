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

from runtime.node.checks.check import check_here
from runtime.settings.load import LoadedTopology, load_topology
from runtime.settings.placement import data_parallel_size, num_engines, num_ranks
from runtime.settings.reading.config import TopologyError
from runtime.settings.recipe import eval_data, eval_sampling, max_prompt_len, over_sampling_batch_size
from runtime.settings.topology import decode_topology, encode_topology
from tests.support.cpu import interpreter_starts

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "topologies/laptop.toml"
COLOCATE = ROOT / "topologies/colocate-8gpu.toml"
DISAGGREGATE = ROOT / "topologies/disaggregate-2x8gpu.toml"
BOXED_COPY_SFT = ROOT / "topologies/boxed-copy-sft.toml"
SHIPPED = sorted(path for place in ("*.toml", "examples/*.toml") for path in (ROOT / "topologies").glob(place))


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.node.checks.machine.gpus_here", lambda: 0)


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(TopologyError) as caught:
        load_topology(path, overrides)
    return {problem.key: problem.message for problem in caught.value.problems}


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
    checked = check_here(load_topology(path), elsewhere=True)
    assert {problem.key for problem in checked.problems} == named


@pytest.mark.usefixtures("no_gpus")
def test_the_check_says_everything_that_is_not_here() -> None:
    found = [str(problem).partition(": ")[2] for problem in check_here(load_topology(COLOCATE)).problems]
    assert [line.partition(" (looked in")[0] for line in found] == [
        "nodes.n0.gpus = 8: this machine has 0 GPUs for us: none, by its environment",
        'engines.policy.kind = "sglang": SGLang is not installed beside us: name an interpreter that has it with '
        'engines.policy.python; or kind = "tiny", for tiny models',
        'model.hf_checkpoint = "Qwen/Qwen3-4B": no such directory, '
        f"not in the hub's cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids a download",
        'data.0.path = "data/gsm8k/train.jsonl": no such file',
        'eval.0.path = "data/gsm8k/test.jsonl": no such file',
    ]


def test_elsewhere_leaves_out_what_only_that_machine_can_show_and_says_so() -> None:
    checked = check_here(load_topology(COLOCATE), elsewhere=True)
    assert not checked.problems
    assert checked.left_out == (
        "GPUs (n0: 8)",
        "interpreters and what is installed in them",
        "paths (model.hf_checkpoint, data.0.path, eval.0.path, run.dir)",
        "addresses and ports",
    )


def test_a_start_refuses_what_it_would_not_do() -> None:
    loaded = load_topology(LAPTOP, ("nodes.other.address=10.0.0.2", "bus.node=local"))
    problem, *_ = check_here(loaded, node="local").problems
    assert str(problem).endswith("a run on several nodes is not built yet; one is")


@pytest.mark.usefixtures("no_gpus")
def test_gpus_asked_where_none_is_stop_a_start_on_that_node() -> None:
    found = [str(problem) for problem in check_here(load_topology(COLOCATE), node="n0").problems]
    assert f"{COLOCATE}: nodes.n0.gpus = 8: this machine has 0 GPUs for us: none, by its environment" in found


def test_gpus_of_a_node_that_has_none_are_refused() -> None:
    found = problems(LAPTOP, "trainer.device=cuda", "trainer.gpus=local:0-1")
    assert found == {"trainer.gpus": "there is no GPU local:0-1: nodes.local.gpus = 0"}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("rollout.over_sampling_batch_size=63",), "rollout.over_sampling_batch_size", "at least rollout.rollout_bat"),
        (("nodes.b.address=10.0.0.2", "bus.node=b"), "nodes.local.address", "other nodes cannot reach loopback"),
        (("nodes.local.address=http://10.0.0.1",), "nodes.local.address", "not an address: it stands without scheme"),
        (("nodes.local.address=10.0.0.1:4222",), "nodes.local.address", "not an address: it stands without scheme"),
        (("nodes.local.address=0.0.0.0",), "nodes.local.address", "not the address of one machine"),
        (("nodes.local.address=fe80::1",), "nodes.local.address", "a link-local address is not unique"),
        (("engines.policy.nodes=['other']",), "engines.policy.nodes", "no node other; allowed: local"),
        (("engines.policy.nodes=['local','local']",), "engines.policy.nodes", "names a node twice"),
        (
            ("engines.policy.nodes=['local']", "engines.policy.colocate=trainer"),
            "engines.policy.nodes",
            "engines run where the trainer is",
        ),
        (
            ("engines.policy.nodes=['local']", "engines.policy.kind=sglang", "engines.policy.urls=['http://h:1']"),
            "engines.policy.nodes",
            "the run does not start engines that run already",
        ),
        (("reward.nodes=['other']",), "reward.nodes", "no node other; allowed: local"),
        (("reward.nodes=['local']", "share=[['reward','filter']]"), "reward.nodes", "a reward actor that shares a pro"),
        (("algorithm.num_steps_per_rollout=3",), "algorithm.num_steps_per_rollout", "must divide the samples"),
        (("rollout.n_samples_per_prompt=1",), "rollout.n_samples_per_prompt", "algorithm.disable_rewards_normalizat"),
        (("rollout.temperature=0",), "rollout.temperature", "allowed: float > 0"),
        (("rollout.max_context_len=16",), "rollout.max_prompt_len", "leaves no room for a response"),
        (("algorithm.use_kl_loss=true",), "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef above 0 turns the KL"),
        (("algorithm.eps_clip=1.5",), "algorithm.eps_clip", "below 1"),
        (("model.ref_load=x/y",), "model.ref_load", "unless algorithm.kl_loss_coef is above 0"),
        (("optimizer.min_lr=1",), "optimizer.min_lr", "is above optimizer.lr"),
        (("optimizer.lr_decay_style=cosine", "optimizer.lr_decay_iters=20"), "optimizer.lr_warmup_iters", "must end"),
        (("reward.group_rm=true", "data.0.rm_type=my:rank", "eval.0.rm_type=none"), "eval.0.rm_type", "sample by"),
        (
            ("rollout.on_weight_update=in_place", "rollout.max_staleness=1", "engines.policy.kind=sglang"),
            "rollout.on_weight_update",
            "needs engines.policy.sglang.disable_radix_cache = true",
        ),
        (
            (
                *("rollout.on_weight_update=in_place", "rollout.max_staleness=1", "engines.policy.kind=sglang"),
                "engines.policy.sglang.disable-radix-cache=false",
            ),
            "rollout.on_weight_update",
            'allowed otherwise: "drain", "abort", "retract"',
        ),
        (("eval.0.max_response_len=64", "rollout.max_context_len=64"), "eval.0.max_response_len", "no room for a"),
        (("rollout.stale_tokens=mask",), "rollout.stale_tokens", "unless rollout.max_token_staleness says"),
        (("rollout.mask_off_policy=true", "rollout.on_halt=restart"), "rollout.mask_off_policy", "one set of weights"),
        (("rollout.over_sampling_filter=sort_by_reward_std",), "rollout.over_sampling_filter", "nothing to choose"),
        (("rollout.keep_when_insufficient=true",), "rollout.keep_when_insufficient", "without rollout.dynamic_filter"),
        (("rollout.buffer_filter=newest", "rollout.on_halt=drop"), "rollout.buffer_filter", "has no effect with"),
        (("rollout.max_token_staleness=1", "rollout.max_staleness=2"), "rollout.max_token_staleness", "is below"),
        (("rollout.on_weight_update=abort",), "rollout.on_weight_update", "has no effect with rollout.max_staleness"),
        (("rollout.eval_overlap=false", "eval=[]"), "rollout.eval_overlap", "without an [[eval]] table"),
        (("data=[]",), "data", "at least one"),
        (("data.0.path=none",), "data.0.path", "missing: a data file; or data.0.source, a function"),
        (("data.0.source=m:f",), "data.0.source", "a source is a file or a function, and data.0.path is set"),
        (("data.0.source=m:f", "data.0.path=none"), "rollout.shuffle", "has no effect on data.0.source"),
        (("data.1.name=e", "data.1.source=m:f"), "data.1.source", "must be the only data source"),
        (("train.num_steps=0",), "train.num_steps", "no train step, unless train.num_epoch says how many"),
        (("train.num_epoch=2",), "train.num_epoch", "train.num_steps = 200 or train.num_epoch says; unset one"),
        (("data.0.source=m:f", "train.num_steps=0", "train.num_epoch=2"), "train.num_epoch", "has no length"),
        (("run.name=a.b",), "run.name", "string matching"),
        (("run.name=",), "run.name", "string matching"),
        (("run.name=../x",), "run.name", "string matching"),
        (("data.0.name=a b",), "data.0.name", "string matching"),
        (("bus.node=n7",), "bus.node", "no such node; allowed: local"),
        (("bus.url=http://x",), "bus.url", "string matching"),
        (("bus.url=nats://x", "bus.port=4222"), "bus.port", "belongs into bus.url"),
        (("bus.data_bytes=1000",), "bus.data_bytes", "too small: this recipe can need"),
        (("rollout.max_response_len=2000000",), "rollout.max_response_len", "the server carries 64 MiB"),
        (("trainer.device=cuda",), "trainer.gpus", "missing"),
        (("engines.policy.update_groups=2",), "engines.policy.update_groups", "the pool has 1; allowed: 1 to"),
        (
            ("engines.policy.update_groups=2", "engines.policy.num_engines=2", "engines.policy.colocate=trainer"),
            "engines.policy.update_groups",
            "no engine serves while those in the trainer's memory take weights",
        ),
        (("engines.policy.weight_transport=ipc",), "engines.policy.weight_transport", 'needs engines.policy.colocate'),
        (
            ("engines.policy.weight_transport=collective", "engines.policy.colocate=trainer"),
            "engines.policy.weight_transport",
            "cannot be in a process group with it",
        ),
        (
            ("engines.policy.weight_transport=collective", 'engines.policy.urls=["http://10.0.0.7:30000"]'),
            "engines.policy.urls",
            "the trainer cannot be reached from there",
        ),
        (
            (
                "engines.policy.weight_transport=collective",
                "engines.policy.kind=sglang",
                "nodes.local.gpus=1",
                "engines.policy.gpus=local:0",
            ),
            "engines.policy.weight_transport",
            "needs trainer and engines on GPUs, or both on the CPU",
        ),
        (
            (
                "engines.policy.weight_transport=collective",
                "engines.policy.kind=sglang",
                "engines.policy.sglang.dp_size=2",
            ),
            "engines.policy.sglang.dp_size",
            "engines of one replica only",
        ),
        (("engines.policy.weight_format=fp8",), "engines.policy.weight_format", "needs engines of SGLang on GPUs"),
        (
            ("engines.policy.weight_format=fp8", "engines.policy.kind=sglang"),
            "engines.policy.weight_format",
            "allowed otherwise: as_trained, bfloat16",
        ),
        (
            (
                "engines.policy.weight_format=fp8",
                "engines.policy.kind=sglang",
                'engines.policy.sglang.json-model-override-args={quantization_config = {}}',
            ),
            "engines.policy.sglang.json-model-override-args",
            "a table without quantization_config",
        ),
        (
            ("engines.policy.weight_transport=collective", "trainer.full_export_interval=4"),
            "trainer.full_export_interval",
            'needs engines.policy.weight_transport = "disk"; allowed otherwise: 1',
        ),
        (
            ("engines.policy.colocate=trainer", "trainer.full_export_interval=4"),
            "trainer.full_export_interval",
            "needs engines with memory of their own",
        ),
        (
            ("engines.policy.urls=['http://x']", "trainer.full_export_interval=4"),
            "engines.policy.urls",
            "no node daemon of the run is there to apply changes",
        ),
        (
            ("engines.policy.weight_transport=collective", "engines.policy.local_copy=true"),
            "engines.policy.local_copy",
            "only files are copied",
        ),
        (
            ("engines.policy.urls=['http://x']", "engines.policy.local_copy=true"),
            "engines.policy.urls",
            "no node daemon of the run is there to copy",
        ),
        (
            ("engines.policy.start_weights=peer",),
            "engines.policy.start_weights",
            'needs engines of SGLang on GPUs that the run starts; allowed otherwise: "files"',
        ),
        (
            ("engines.policy.start_weights=peer", "engines.policy.kind=sglang", 'engines.policy.urls=["http://x"]'),
            "engines.policy.start_weights",
            "needs engines of SGLang on GPUs that the run starts",
        ),
        (("trainer.full_export_interval=0",), "trainer.full_export_interval", ">= 1"),
        (("engines.policy.num_gpus_per_engine=2",), "engines.policy.num_gpus_per_engine", "gpus is not set"),
        (("engines.policy.gpus=local:0", "engines.policy.kind=sglang"), "engines.policy.gpus", "there is no GPU"),
        (("trainer.num_processes=3",), "trainer.megatron", "3 data-parallel replicas do not divide the 256 samples"),
        (("engines.policy.colocate=trainer", "rollout.max_staleness=1"), "rollout.max_staleness", "take turns"),
        (("trainer.log_probs_ahead=true",), "trainer.log_probs_ahead", "has nothing to compute"),
        (
            ("engines.policy.colocate=trainer", "trainer.log_probs_ahead=true", "algorithm.kl_loss_coef=0.1"),
            "trainer.log_probs_ahead",
            "colocated engines have the GPUs",
        ),
        (
            ("engines.policy.colocate=trainer", "trainer.weight_export=async"),
            "trainer.weight_export",
            "nothing trains beside",
        ),
        (
            ("engines.policy.colocate=trainer", "engines.policy.urls=['http://x']"),
            "engines.policy.colocate",
            "engines that others run are not told to give memory back",
        ),
        (("trainer.handover=copy",), "trainer.handover=copy", 'to trainer.weight_export: "live" (was "stream")'),
        (("trainer.finetune=true",), "trainer.finetune=true", "renamed to trainer.load_weights_only"),
        (("engines.policy.kind=embedded",), "engines.policy.kind", 'renamed to "tiny"'),
        (("engines.a b.kind=tiny",), "engines.a b", "the name does not fit"),
        (("engines.judge.kind=tiny",), "engines.judge", "no actor uses this pool; allowed: policy"),
        (("engines.policy.env.PHYSARUM_RUN='r'",), "engines.policy.env.PHYSARUM_RUN", "a run sets this variable"),
        (("engines.policy.env.A=b", "engines.policy.urls=['http://x']"), "engines.policy.env", "have their own"),
        (("engines.policy.env={\"A B\" = \"c\"}",), "engines.policy.env", "allowed: a table"),
        (
            ("engines.policy.sglang.enable-deterministic-inference=true", "engines.policy.batch_requests=true"),
            "engines.policy.batch_requests",
            "allowed with engines.policy.sglang.enable-deterministic-inference: false",
        ),
        (("engines.policy.num_processes=2",), "engines.policy.num_processes", 'is for engines of kind = "sglang"'),
        (("engines.policy.sglang.nnodes=2",), "engines.policy.sglang.nnodes", "is num_processes of the pool"),
        (("engines.policy.ready_timeout_s=0",), "engines.policy.ready_timeout_s", "allowed: float >= 1 and <= 86400"),
        (("engines.policy.ready_timeout_s=1e9",), "engines.policy.ready_timeout_s", "allowed: float >= 1 and <= 86400"),
        (("engines.policy.update_timeout_s=0.5",), "engines.policy.update_timeout_s", "allowed: float >= 1"),
        (("engines.policy.sglang.model-path=m",), "engines.policy.sglang.model-path", "is model.hf_checkpoint"),
        (("engines.policy.sglang.port=1",), "engines.policy.sglang.port", "not allowed here: engines listen where"),
        (("engines.policy.sglang.max_total_tokens=9",), "engines.policy.sglang.max_total_tokens", "of the pool"),
    ],
)  # fmt: skip
def test_rules_of_the_laptop_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(LAPTOP, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("engines.policy.gpus=n0:4-7",), "engines.policy.gpus", "n0:4-7 belong to the trainer; sharing needs"),
        (("engines.policy.gpus=n1:6-9",), "engines.policy.gpus", "there is no GPU n1:8-9: nodes.n1.gpus = 8"),
        (("engines.policy.gpus=n2:0",), "engines.policy.gpus", "no node n2; allowed: n0, n1"),
        (("engines.policy.gpus=n1:0-3,n1:3",), "engines.policy.gpus", "names a GPU twice"),
        (("engines.policy.gpus=all",), "engines.policy.gpus", "NODE:INDEX"),
        (("engines.judge.gpus=n1:7",), "engines.judge.gpus", "n1:7 belong to engines.policy too"),
        (("engines.policy.num_gpus_per_engine=3",), "engines.policy.num_gpus_per_engine", "does not divide"),
        (
            ("engines.policy.num_gpus_per_engine=4", "engines.policy.gpus=n1:0-5,n0:0-1", "trainer.gpus=n0:2-7"),
            "engines.policy.num_gpus_per_engine",
            "does not fit the GPUs per node: 6 on n1, 2 on n0",
        ),
        (("engines.policy.num_processes=2",), "engines.policy.num_processes", "does not divide the 1 GPUs"),
        (("engines.policy.colocate=trainer",), "engines.policy.gpus", "colocated engines use the trainer's GPUs"),
        (("engines.policy.kind=tiny",), "engines.policy.gpus", "runs on the CPU"),
        (("trainer.megatron.pipeline_model_parallel_size=3",), "trainer.megatron", "= 6 does not divide"),
        (("trainer.megatron.expert_model_parallel_size=8",), "trainer.megatron.expert_model_parallel_size", "= 16"),
        (
            ("trainer.megatron.tensor_model_parallel_size=1",),
            "trainer.megatron.sequence_parallel",
            "tensor_model_parallel_size above 1",
        ),
        (("trainer.megatron.mtp_num_layers=2",), "trainer.megatron.mtp_num_layers", "more than one MTP layer"),
        (
            (
                "trainer.megatron.mtp_num_layers=1",
                "trainer.megatron.pipeline_model_parallel_size=2",
                "trainer.ddp.overlap_grad_reduce=true",
            ),
            "trainer.megatron.mtp_num_layers",
            "needs trainer.ddp.overlap_grad_reduce = false",
        ),
        (
            ('trainer.megatron.recompute_modules=["mlp"]',),
            "trainer.megatron.recompute_modules",
            'is for trainer.megatron.recompute_granularity = "selective"',
        ),
        (
            ("trainer.megatron.distribute_saved_activations=true",),
            "trainer.megatron.distribute_saved_activations",
            "without sequence_parallel",
        ),
        (
            ("trainer.ddp.pad_buckets_for_high_nccl_busbw=true", "trainer.optimizer.use_distributed_optimizer=false"),
            "trainer.ddp.pad_buckets_for_high_nccl_busbw",
            "needs trainer.optimizer.use_distributed_optimizer",
        ),
        (("trainer.num_processes=2",), "trainer.num_processes", "one rank each"),
        (("bus.url=nats://x",), "bus.node", "no node starts a server when bus.url"),
        (("bus.node=none",), "bus", "with several nodes"),
    ],
)  # fmt: skip
def test_rules_of_the_disaggregated_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(DISAGGREGATE, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ((), "start_weights", 'is compared with its checksum: needs engines.policy.verify = "always"'),
        (
            ("verify=always", "num_gpus_per_engine=8"),
            "start_weights",
            "an engine's peers are those of its node, and no",
        ),
        (("verify=always", "num_gpus_per_engine=4", "num_processes=2"), "start_weights", "num_processes = 1"),
        (("verify=always", "weight_format=fp8"), "start_weights", "weight_format other than fp8"),
        (("verify=always", "sglang.pp-size=2"), "sglang.pp-size", "allowed: 1"),
        (("verify=always", "sglang.data_parallel_size=2"), "sglang.data_parallel_size", "allowed: 1"),
        (("verify=always", "sglang.load_format=dummy"), "sglang.load_format", "allowed: left out"),
        (("verify=always", "sglang.quantization=fp8"), "sglang.quantization", "allowed: left out"),
        (("verify=always", "sglang.speculative-algorithm=EAGLE"), "sglang.speculative-algorithm", "allowed: left out"),
        (
            ("verify=always", "sglang.remote_instance_weight_loader_backend=nccl"),
            "sglang.remote_instance_weight_loader_backend",
            "allowed: left out",
        ),
    ],
)
def test_what_a_peer_cannot_give_an_engine_at_its_start_is_refused(
    overrides: tuple[str, ...], key: str, message: str
) -> None:
    pool = tuple(f"engines.policy.{override}" for override in ("start_weights=peer", *overrides))
    assert message in problems(DISAGGREGATE, *pool)[f"engines.policy.{key}"]


def test_engines_that_give_their_weights_back_are_no_peers() -> None:
    found = problems(COLOCATE, "engines.policy.start_weights=peer", "engines.policy.verify=always")
    assert "needs engines.policy.colocate left out" in found["engines.policy.start_weights"]


def test_engines_of_one_node_may_take_their_first_weights_from_each_other() -> None:
    pool = ("engines.policy.start_weights=peer", "engines.policy.verify=always", "engines.policy.num_gpus_per_engine=4")
    assert load_topology(DISAGGREGATE, pool).topology.engines["policy"].start_weights == "peer"


def test_engines_over_several_nodes_need_whole_nodes() -> None:
    overrides = ("engines.policy.gpus=n0:0-7,n1:0-7", "engines.policy.num_gpus_per_engine=16", "trainer.device=cpu")
    off = ("trainer.gpus=none", "trainer.megatron.sequence_parallel=false")
    layout = ("trainer.megatron.tensor_model_parallel_size=1", "engines.policy.weight_transport=disk")
    topology = load_topology(DISAGGREGATE, (*overrides, *off, *layout)).topology
    assert num_engines(topology.engines["policy"]) == 1


def test_two_data_sources_or_sets_of_one_name_are_refused() -> None:
    found = problems(LAPTOP, "data.1.name=reverse-digits", "data.1.path=x", "eval.1.name=e", "eval.1.path=x",
                     "eval.1.interval=1", "eval.2.name=e", "eval.2.path=x", "eval.2.interval=1")  # fmt: skip
    assert found == {
        "data.1.name": "another [[data]] has this name",
        "eval.2.name": "another [[eval]] has this name",
    }


def test_all_broken_rules_are_reported_at_once() -> None:
    found = problems(LAPTOP, "rollout.n_samples_per_prompt=1", "bus.node=x", "model.ref_load=y")
    assert found.keys() == {"rollout.n_samples_per_prompt", "bus.node", "model.ref_load"}


def test_a_group_of_one_is_fine_without_reward_normalisation() -> None:
    load_topology(LAPTOP, ("rollout.n_samples_per_prompt=1", "algorithm.disable_rewards_normalization=true"))


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
    assert (algorithm.eps_clip, algorithm.eps_clip_high, algorithm.num_steps_per_rollout) == (0.2, 0.28, 2)
    assert (algorithm.entropy_coef, algorithm.entropy_coef_end, topology.train.num_steps) == (0.1, 0.0, 200)
    assert (optimizer.lr, optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (3e-3, 0.9, 0.95, 0.0)
    assert algorithm.use_rollout_logprobs
    assert algorithm.calculate_per_token_loss


# What is looked for on this machine


def test_paths_of_a_file_are_found_beside_it_before_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "demo/data/reverse-digits/train.jsonl"
    shadow.parent.mkdir(parents=True)
    shadow.write_text('{"input": "1", "label": "1"}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # of which ../demo is the shadow
    topology = load_topology(LAPTOP).topology
    assert topology.data[0].path == str(ROOT / "topologies/demo/data/reverse-digits/train.jsonl")
    assert topology.model.hf_checkpoint == str(ROOT / "topologies/demo/models/reverse-digits")
    assert topology.run.dir == str(tmp_path / "here/runs")


@pytest.mark.parametrize("name", ["laptop.toml", "recipes/reverse-digits.toml", "boxed-copy-sft.toml"])
def test_a_topology_of_ones_own_may_include_a_shipped_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        f'include = "{name}"\nrun.name = "mine"\ntrainer.device = "cpu"\nengines.policy = {{ kind = "tiny" }}\n'
        if "recipes" in name
        else f'include = "{name}"\nrun.name = "mine"\n'
    )
    topology = load_topology(Path("mine.toml")).topology
    for path in (topology.model.hf_checkpoint, topology.data[0].path):
        assert str(path).startswith(str(ROOT / "topologies/demo"))
        assert Path(str(path)).exists()


def test_paths_of_an_override_are_found_in_the_current_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"input": "1", "label": "1"}\n')
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    overrides = ("data.0.path=mine.jsonl", "data.0.rm_type=mine.py:grade", "rollout.dynamic_filter=mine.py:keep",
                 "rollout.buffer_filter=mine.py:first", "rollout.custom_generate=mine.py:talk")  # fmt: skip
    topology = load_topology(LAPTOP, overrides).topology
    assert topology.data[0].path == str(tmp_path / "mine.jsonl")
    assert topology.data[0].rm_type == f"{tmp_path}/mine.py:grade"
    assert topology.rollout.dynamic_filter == f"{tmp_path}/mine.py:keep"
    assert topology.rollout.buffer_filter == f"{tmp_path}/mine.py:first"
    assert topology.rollout.custom_generate == f"{tmp_path}/mine.py:talk"


def test_the_file_of_a_function_is_found_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    loaded = load_topology(LAPTOP, ("data.0.path=none", "data.0.source=mine.py:source", "rollout.shuffle=false"))
    assert loaded.topology.data[0].source == f"{tmp_path}/mine.py:source"
    assert check_here(loaded).problems == ()


def test_the_file_of_a_slice_is_found_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("data.0.path=demo/data/reverse-digits/train.jsonl@[10:20]", "eval.0.path=mine.jsonl@[:1]")
    monkeypatch.chdir(tmp_path)
    loaded = load_topology(LAPTOP, overrides)
    assert loaded.topology.data[0].path == f"{ROOT}/topologies/demo/data/reverse-digits/train.jsonl@[10:20]"
    assert [str(problem) for problem in check_here(loaded).problems] == [
        f'--set: eval.0.path = "mine.jsonl@[:1]": no such file (looked in {tmp_path}, {ROOT / "topologies"})'
    ]
    (tmp_path / "mine.jsonl@[:1]").write_text('{"input": "1", "label": "1"}\n')
    assert load_topology(LAPTOP, overrides).topology.eval[0].path == f"{tmp_path}/mine.jsonl@[:1]"


def test_an_empty_slice_is_an_input_error_with_the_length_of_its_file() -> None:
    loaded = load_topology(LAPTOP, ("data.0.path=demo/data/reverse-digits/train.jsonl@[78:]",))
    (problem,) = check_here(loaded).problems
    assert problem.message.endswith("the slice is empty: " + loaded.topology.data[0].path[:-6] + " has 78 rows")


def test_a_path_found_nowhere_is_kept_and_reported_with_the_places() -> None:
    loaded = load_topology(LAPTOP, ("data.0.path=no/such.jsonl",))
    assert loaded.topology.data[0].path == "no/such.jsonl"
    (problem,) = check_here(loaded).problems
    assert problem.key == "data.0.path"
    assert problem.file == "--set"
    assert problem.message == f"no such file (looked in {Path.cwd()}, {ROOT / 'topologies'})"


def checked(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return [str(problem) for problem in check_here(load_topology(LAPTOP, (f"data.0.path={path}",))).problems]


def test_a_malformed_line_is_an_input_error_with_its_number(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, '{"input": "12", "label": "21"}\n{"input": "1\n')
    assert line.startswith(f'--set: data.0.path = "{tmp_path}/rows.jsonl": {tmp_path}/rows.jsonl:2: not a JSON object')


def test_a_missing_column_is_an_input_error_that_names_the_columns_there(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, '{"input": "12", "answer": "21"}\n')
    assert line.endswith("rows.jsonl:1: no column 'label' (label_key); there are: input, answer")


def test_an_empty_file_is_an_input_error(tmp_path: Path) -> None:
    (line,) = checked(tmp_path, "\n")
    assert line.endswith("the file has no rows")


def model_problems(directory: Path, *overrides: str) -> list[str]:
    loaded: LoadedTopology = load_topology(LAPTOP, (f"model.hf_checkpoint={directory}", *overrides))
    return [problem.message for problem in check_here(loaded).problems]


def test_a_model_directory_needs_config_tokenizer_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_problems(tmp_path) == [
        "no tokenizer in this directory: tokenizer.json, tokenizer.model or vocab.json",
    ]
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert model_problems(tmp_path, "model.random_init=false") == [
        "no config.json in this directory",
        "no weights in this directory: model.safetensors or model.safetensors.index.json; "
        "model.random_init = true draws them from run.seed",
    ]


def test_a_misspelt_model_directory_is_not_taken_for_a_hub_name() -> None:
    loaded = load_topology(LAPTOP, ("model.hf_checkpoint=demo/models/reverse-digit",))
    (problem,) = check_here(loaded).problems
    assert problem.message.startswith("no such directory (looked in ")


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
    notes = check_here(load_topology(LAPTOP, overrides), elsewhere=True).notes
    assert any("train.on_too_long" in note for note in notes) is told


def test_checking_a_topology_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.settings.load import load_topology; "
        f"from runtime.node.checks.check import check_here; check_here(load_topology(Path({str(LAPTOP)!r}))); "
        "print(sorted({'torch', 'nats', 'transformers', 'anyio'} & set(sys.modules)))"
    )
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=20)
    assert result.stdout.decode().strip() == "[]"
    assert interpreter_starts(command, env=environment) < 40  # numpy, of the messages, is ten of them


def test_the_schema_has_no_mutable_table() -> None:
    topology = load_topology(LAPTOP).topology
    with pytest.raises(AttributeError):
        topology.run.name = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(topology.run, name="x").name == "x"


@pytest.mark.parametrize(
    "overrides",
    [
        ("engines.policy.kind=tiny",),  # which keeps no prefixes
        ("engines.policy.kind=sglang", "engines.policy.sglang.disable-radix-cache=true"),
        ("engines.policy.kind=sglang", 'engines.policy.urls=["http://127.0.0.1:30000"]'),  # asked at the start
    ],
)
def test_an_update_in_place_is_allowed_without_a_prefix_cache(overrides: tuple[str, ...]) -> None:
    in_place = ("rollout.on_weight_update=in_place", "rollout.max_staleness=1")
    assert load_topology(LAPTOP, [*in_place, *overrides]).topology.rollout.on_weight_update == "in_place"


def test_directories_of_an_engines_import_path_are_looked_up_beside_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    file = tmp_path / "mine.toml"
    path = os.pathsep.join(["shim", "/elsewhere", "nowhere", ""])
    file.write_text(f'include = "laptop.toml"\n[engines.policy.env]\nPYTHONPATH = "{path}"\nA = "shim"\n')
    env = load_topology(file).topology.engines["policy"].env
    assert env == {"PYTHONPATH": os.pathsep.join([str(tmp_path / "shim"), "/elsewhere", "nowhere", ""]), "A": "shim"}
