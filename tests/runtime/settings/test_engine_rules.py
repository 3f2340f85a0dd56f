"""The rules of engine pools: what is refused, with its key and message."""

import pytest

from runtime.settings.load import load_topology
from runtime.settings.placement import num_engines
from tests.runtime.settings.shipped import COLOCATE, DISAGGREGATE, LAPTOP, problems

JUDGED = "reward.judges.j={template = '{response}'}"
PPO = "algorithm.estimator.type=ppo"
IN_PLACE = ("rollout.on_weight_update=in_place", "rollout.max_staleness=1", "engines.policy.kind=sglang")
ROUTED = "engines.policy.router=sglang-router"
ASKS = ("algorithm.opd.type=sglang",)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
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
        (
            ("engines.policy.num_nodes_per_engine=2",),
            "engines.policy.num_nodes_per_engine",
            "is above engines.policy.num_processes = 1 or the 0 nodes of engines.policy.nodes",
        ),
        (("engines.policy.router_policy=manual",), "engines.policy.router_policy", "needs engines.policy.router = "),
        (("engines.policy.router_url=http://h:1",), "engines.policy.router_url", "needs engines.policy.router = "),
        (
            (ROUTED, "engines.policy.router_policy=manual", "engines.policy.router_url=http://h:1"),
            "engines.policy.router_policy",
            "has no effect on an external router",
        ),
        (
            (
                *("rollout.return_sampling_mask=true", "rollout.top_k=64", "engines.policy.kind=sglang"),
                "engines.policy.sglang.sampling_mask_max_tokens=32",
            ),
            "engines.policy.sglang.sampling_mask_max_tokens",
            "needs at least 64 here",
        ),
        (("engines.policy.update_groups=2",), "engines.policy.update_groups", "is above the number of engines"),
        (
            ("engines.policy.update_groups=2", "engines.policy.num_engines=2", "engines.policy.colocate=trainer"),
            "engines.policy.update_groups",
            "colocated engines are updated together, while none serves",
        ),
        (("engines.policy.weight_transport=ipc",), "engines.policy.weight_transport", 'needs engines.policy.colocate'),
        (
            ("engines.policy.weight_transport=collective", "engines.policy.colocate=trainer"),
            "engines.policy.weight_transport",
            "colocated engines cannot join a process group with the trainer",
        ),
        (
            ("engines.policy.weight_transport=collective", 'engines.policy.urls=["http://10.0.0.7:30000"]'),
            "engines.policy.urls",
            "these engines cannot reach the trainer",
        ),
        (
            ("engines.policy.weight_transport=http", 'engines.policy.urls=["http://10.0.0.7:30000"]'),
            "engines.policy.weight_transport",
            "no node daemon of the run fetches files for external engines",
        ),
        (
            ("engines.policy.weight_transport=http", "engines.policy.colocate=trainer"),
            "engines.policy.weight_transport",
            "colocated engines are beside the trainer's files",
        ),
        (
            (
                "engines.policy.weight_transport=http",
                'nodes={local={address="10.0.0.1"}, n1={address="10.0.0.2"}}',
                "bus.node=local",
                'trainer.nodes=["n1"]',
            ),
            "engines.policy.weight_transport",
            "not implemented yet: a pipeline stage whose first rank is on another node than home, local",
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
            "SGLang updates only engines with one replica",
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
            ("engines.policy.urls=['http://x']", "trainer.full_export_interval=4"),
            "engines.policy.urls",
            "no node daemon of the run applies deltas",
        ),
        (
            ("engines.policy.weight_transport=collective", "engines.policy.local_copy=true"),
            "engines.policy.local_copy",
            "local copies are made of files only",
        ),
        (
            ("engines.policy.urls=['http://x']", "engines.policy.local_copy=true"),
            "engines.policy.urls",
            "no node daemon of the run copies files",
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
        (("engines.policy.num_gpus_per_engine=2",), "engines.policy.num_gpus_per_engine", "needs engines.policy.gpus"),
        (("engines.policy.gpus=local:0", "engines.policy.kind=sglang"), "engines.policy.gpus", "there is no GPU"),
        (
            ("engines.policy.colocate=trainer", "engines.policy.urls=['http://x']"),
            "engines.policy.colocate",
            "a run does not release the memory of external engines",
        ),
        (("engines.policy.kind=embedded",), "engines.policy.kind", 'renamed to "tiny"'),
        (("engines.a b.kind=tiny",), "engines.a b", "this name is not allowed"),
        (("engines.judge.kind=tiny",), "engines.judge", "no actor uses this pool; allowed: policy"),
        (("engines.teacher.kind=tiny",), "engines.teacher", "no actor uses this pool; allowed: policy"),
        (("engines.ref.kind=tiny",), "engines.ref", "no actor uses this pool; allowed: policy"),
        (("algorithm.kl.loss_coef=0.1", "engines.ref.kind=tiny"), "engines.ref.hf_checkpoint", "missing: the model"),
        (("algorithm.kl.loss_coef=0.1", "engines.r.kind=tiny"), "engines.r", "allowed: policy, ref"),
        (("engines.policy.hf_checkpoint=x/y",), "engines.policy.hf_checkpoint", "serve the model that is trained"),
        (ASKS, "engines.teacher", 'missing: the engines of a teacher, which algorithm.opd.type = "sglang" needs'),
        ((*ASKS, "engines.math.kind=tiny"), "engines.math", "no actor uses this pool; allowed: policy, teacher"),
        ((*ASKS, "data.0.teacher=math"), "engines.math", "missing: the engines of a teacher"),
        ((*ASKS, "engines.teacher.kind=tiny"), "engines.teacher.hf_checkpoint", "missing: the model of these engines"),
        (
            (*ASKS, 'engines.teacher={kind = "tiny", hf_checkpoint = "x/y", weight_transport = "collective"}'),
            "engines.teacher.weight_transport",
            "has no effect: the model of this pool does not change",
        ),
        (
            (*ASKS, 'engines.teacher={kind = "tiny", hf_checkpoint = "x/y", colocate = "trainer"}'),
            "engines.teacher.colocate",
            "has no effect: the model of this pool does not change",
        ),
        (
            ("engines.policy.concurrency=8", "engines.policy.min_concurrency=9"),
            "engines.policy.min_concurrency",
            "is above engines.policy.concurrency, 8",
        ),
        ((JUDGED, "engines.judge.kind=tiny"), "engines.judge.hf_checkpoint", "missing: the model of these engines"),
        ((JUDGED, "engines.other.kind=tiny"), "engines.other", "allowed: policy, judge, a pool of a judge"),
        (
            (JUDGED, 'engines.judge={kind = "tiny", hf_checkpoint = "x/y", update_groups = 2}'),
            "engines.judge.update_groups",
            "has no effect: the model of this pool does not change",
        ),
        (("engines.policy.env.PHYSARUM_RUN='r'",), "engines.policy.env.PHYSARUM_RUN", "the run sets this variable"),
        (("engines.policy.env.A=b", "engines.policy.urls=['http://x']"), "engines.policy.env", "has no effect"),
        (("engines.policy.env={\"A B\" = \"c\"}",), "engines.policy.env", "allowed: a table"),
        (
            ("engines.policy.sglang.enable-deterministic-inference=true", "engines.policy.batch_requests=true"),
            "engines.policy.batch_requests",
            "allowed with engines.policy.sglang.enable-deterministic-inference: false",
        ),
        (("engines.policy.num_processes=2",), "engines.policy.num_processes", 'needs engines of kind = "sglang"'),
        (("engines.policy.sglang.nnodes=2",), "engines.policy.sglang.nnodes", "set num_processes of the pool"),
        (("engines.policy.ready_timeout_s=0",), "engines.policy.ready_timeout_s", "allowed: float >= 1 and <= 86400"),
        (("engines.policy.ready_timeout_s=1e9",), "engines.policy.ready_timeout_s", "allowed: float >= 1 and <= 86400"),
        (("engines.policy.update_timeout_s=9",), "engines.policy.update_timeout_s=9", "renamed to update_stall_s"),
        (("engines.policy.min_load_mb_per_s=0",), "engines.policy.min_load_mb_per_s", "allowed: float > 0"),
        (("engines.policy.update_stall_s=0.5",), "engines.policy.update_stall_s", "allowed: float >= 1"),
        (("engines.policy.sglang.model-path=m",), "engines.policy.sglang.model-path", "set model.hf_checkpoint"),
        (("engines.policy.sglang.port=1",), "engines.policy.sglang.port", "not allowed here: the node daemon assigns"),
        (("engines.policy.sglang.max_total_tokens=9",), "engines.policy.sglang.max_total_tokens", "of the pool"),
    ],
)  # fmt: skip
def test_engine_rules_of_the_laptop_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(LAPTOP, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("engines.policy.gpus=n0:4-7",), "engines.policy.gpus", "n0:4-7 belong to the trainer; sharing needs"),
        (("engines.policy.gpus=n1:6-9",), "engines.policy.gpus", "there is no GPU n1:8-9: nodes.n1.gpus = 8"),
        ((PPO, "trainer.critic.gpus=n1:0-1"), "engines.policy.gpus", "n1:0-1 belong to the critic"),
        (("engines.policy.gpus=n2:0",), "engines.policy.gpus", "no node n2; allowed: n0, n1"),
        (("engines.policy.gpus=n1:0-3,n1:3",), "engines.policy.gpus", "lists a GPU twice"),
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
        (
            ("engines.policy.num_nodes_per_engine=2",),
            "engines.policy.num_nodes_per_engine",
            "has no effect with gpus: the GPUs decide the nodes",
        ),
    ],
)  # fmt: skip
def test_engine_rules_of_the_disaggregated_topology(overrides: tuple[str, ...], key: str, message: str) -> None:
    found = problems(DISAGGREGATE, *overrides)
    assert message in found[key]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ((), "start_weights", 'verified by their checksum: needs engines.policy.verify = "always"'),
        (
            ("verify=always", "num_gpus_per_engine=8"),
            "start_weights",
            "peers are engines of one node, and no",
        ),
        (("verify=always", "num_gpus_per_engine=4", "num_processes=2"), "start_weights", "num_processes = 1"),
        (("verify=always", "weight_format=fp8"), "start_weights", "weight_format other than fp8"),
        (("verify=always", "sglang.pp-size=2"), "sglang.pp-size", "allowed with "),
        (("verify=always", "sglang.data_parallel_size=2"), "sglang.data_parallel_size", "allowed with "),
        (("verify=always", "sglang.load_format=dummy"), "sglang.load_format", "remove it"),
        (("verify=always", "sglang.quantization=fp8"), "sglang.quantization", "remove it"),
        (("verify=always", "sglang.speculative-algorithm=EAGLE"), "sglang.speculative-algorithm", "remove it"),
        (
            ("verify=always", "sglang.remote_instance_weight_loader_backend=nccl"),
            "sglang.remote_instance_weight_loader_backend",
            "remove it",
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
    assert "needs engines.policy.colocate unset" in found["engines.policy.start_weights"]


def test_engines_of_one_node_may_take_their_first_weights_from_each_other() -> None:
    pool = ("engines.policy.start_weights=peer", "engines.policy.verify=always", "engines.policy.num_gpus_per_engine=4")
    assert load_topology(DISAGGREGATE, pool).topology.engines["policy"].start_weights == "peer"


def test_engines_over_several_nodes_need_whole_nodes() -> None:
    overrides = ("engines.policy.gpus=n0:0-7,n1:0-7", "engines.policy.num_gpus_per_engine=16", "trainer.device=cpu")
    off = ("trainer.gpus=none", "trainer.megatron.sequence_parallel=false")
    layout = ("trainer.megatron.tensor_model_parallel_size=1", "engines.policy.weight_transport=disk")
    topology = load_topology(DISAGGREGATE, (*overrides, *off, *layout)).topology
    assert num_engines(topology.engines["policy"]) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        (),  # the actor chooses the engine
        (ROUTED, "engines.policy.kind=tiny"),  # which keeps no prefixes
        (ROUTED, "engines.policy.sglang.disable-radix-cache=true"),
        (ROUTED, 'engines.policy.urls=["http://127.0.0.1:30000"]'),  # asked at the start
    ],
)
def test_an_update_in_place_is_allowed_where_no_answer_has_an_older_prefix(overrides: tuple[str, ...]) -> None:
    assert load_topology(LAPTOP, [*IN_PLACE, *overrides]).topology.rollout.on_weight_update == "in_place"
