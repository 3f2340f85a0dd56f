"""The layout that --plan draws, and the room that streams get."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.processes import process_specs
from messages import SampleKey, SegmentsPublished, WeightSpan
from messages.arrays import Float32Array, Int32Array, UInt8Array
from messages.codec import encode
from messages.samples import Segment
from runtime.settings.load import load_topology
from runtime.settings.plan import Plan, draw, plan_of
from runtime.settings.sizes import (
    MIB,
    group_bytes,
    kept_batches,
    logged_steps,
    needed_sizes,
    prompt_len_bound,
    show_bytes,
    stream_limits,
    stream_sizes,
)
from runtime.settings.topology import Topology

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "topologies/laptop.toml"
COLOCATE = ROOT / "topologies/colocate-8gpu.toml"
DISAGGREGATE = ROOT / "topologies/disaggregate-2x8gpu.toml"
WIDE = ("engines.policy.num_gpus_per_engine=8", "engines.policy.sglang={tp_size = 8}")


def load(path: Path, *overrides: str) -> Topology:
    return load_topology(path, overrides).topology


def planned(topology: Topology) -> Plan:
    run_dir = Path(topology.run.dir) / topology.run.name
    return plan_of(topology, {node: process_specs(topology, node, run_dir) for node in topology.nodes})


def drawn(path: Path, *overrides: str) -> str:
    topology = load(path, *overrides)
    return draw(topology, planned(topology))


def test_every_process_of_the_laptop_run_is_drawn() -> None:
    (node,) = planned(load(LAPTOP)).nodes
    names = [process.name for process in node.processes]
    assert names[0] == "nats-server"
    assert {"engine.policy.0", "trainer", "rollout", "reward", "buffer"} < set(names)
    text = drawn(LAPTOP, "bus.port=4333")
    assert all(name in text for name in names)
    assert "nats-server        127.0.0.1, port 4333" in text
    assert "node local (127.0.0.1, 0 GPUs)" in text


def test_a_filter_is_drawn_only_where_the_recipe_has_one() -> None:
    (node,) = planned(load(LAPTOP)).nodes
    (filtered,) = planned(load(LAPTOP, "rollout.dynamic_filter=nonzero_std")).nodes
    names = [process.name for process in filtered.processes]
    names.remove("filter")
    assert names == [process.name for process in node.processes]
    assert "filter" not in drawn(LAPTOP)
    assert "filter" in drawn(LAPTOP, "rollout.dynamic_filter=nonzero_std")


def test_a_grader_of_external_workers_is_drawn_as_theirs() -> None:
    external = ("reward.external=['judge']", "data.0.rm_type=judge", "nodes.local.address=auto")
    assert "graded by judge of external workers" in drawn(LAPTOP, *external)
    assert "external" not in drawn(LAPTOP)


def test_a_sum_of_graders_is_drawn_with_its_weights() -> None:
    total = ("reward.sums.total={f1 = 0.5, numeric = -1}", "data.0.rm_type=total")
    assert "graded by total = 0.5 f1 + -1 numeric" in drawn(LAPTOP, *total)


def test_a_critic_with_ranks_of_its_own_is_drawn_with_their_processes_and_its_layout() -> None:
    ppo = ("algorithm.estimator.type=ppo", "trainer.num_processes=2")
    own = ("trainer.critic.num_processes=2", "trainer.critic.megatron.pipeline_model_parallel_size=2")
    text = drawn(LAPTOP, *ppo, *own)
    assert "  trainer  2 ranks on cpu: 2 data parallel" in text
    assert "  critic   2 ranks of its own (trainer.2 to 3) on cpu: 2 pipeline parallel" in text
    assert "trainer.0-3" in text
    assert "  critic   1 rank of its own (trainer.2) on cpu\n" in drawn(LAPTOP, *ppo, own[0].replace("2", "1"))
    assert "of its own" not in drawn(LAPTOP, *ppo)


def test_the_objective_is_drawn_where_the_run_trains() -> None:
    assert "  advantage   A = (R - mean of group)" in drawn(LAPTOP)
    assert "[PPO, arXiv 1707.06347]" in drawn(LAPTOP)


def test_a_plan_is_also_json() -> None:
    plan = planned(load(LAPTOP))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


def test_colocated_engines_and_ranks_are_drawn_on_the_same_gpus() -> None:
    (node,) = planned(load(COLOCATE)).nodes
    by_name = {process.name: process.gpus for process in node.processes}
    assert all(by_name[f"engine.policy.{index}"] == by_name[f"trainer.{index}"] == (index,) for index in range(8))
    text = drawn(COLOCATE)
    assert "engine.policy.0-7  GPU 0-7, 1 each" in text
    assert "trainer.0-7        GPU 0-7, 1 each" in text
    assert "colocated with the trainer" in text
    assert "8 ranks on cuda: 2 tensor, 4 data parallel" in text


def test_ranks_and_engines_take_gpus_by_node_address_then_index_however_they_are_listed() -> None:
    topology = load(
        DISAGGREGATE,
        "trainer.gpus=n1:4-7,n0:7,6,5,4",
        "engines.policy.gpus=n1:3,2,1,0,n0:0-3",
        "nodes.n0.address=10.0.0.10",
        "nodes.n1.address=10.0.0.9",
    )
    n0, n1 = planned(topology).nodes
    on_n0, on_n1 = ({process.name: process.gpus for process in node.processes} for node in (n0, n1))
    assert [on_n1[f"trainer.{rank}"] for rank in range(4)] == [(4,), (5,), (6,), (7,)]
    assert [on_n0[f"trainer.{rank}"] for rank in range(4, 8)] == [(4,), (5,), (6,), (7,)]
    assert [on_n1[f"engine.policy.{index}"] for index in range(4)] == [(0,), (1,), (2,), (3,)]


def test_what_chooses_the_engines_is_drawn() -> None:
    routed, external = "engines.policy.router=sglang-router", "engines.policy.router_url=http://10.0.0.5:30000"
    assert ", dispatcher direct\n" in drawn(LAPTOP)
    assert ", dispatcher sglang-router (manual)\n" in drawn(LAPTOP, routed, "engines.policy.router_policy=manual")
    assert ", dispatcher sglang-router (http://10.0.0.5:30000)\n" in drawn(LAPTOP, routed, external)


def test_two_nodes_are_drawn_with_what_runs_on_each() -> None:
    plan = planned(load(DISAGGREGATE))
    n0, n1 = plan.nodes
    assert n0.processes[0].name == "nats-server"
    assert {process.name for process in n1.processes} == {f"engine.policy.{index}" for index in range(8)}
    assert (plan.num_ranks, plan.data_parallel_size) == (8, 4)
    assert [node.is_home for node in plan.nodes] == [True, False]


def test_every_node_is_drawn_with_its_address_gpus_processes_and_ports() -> None:
    text = drawn(
        DISAGGREGATE,
        "nodes.n0.address=10.0.0.10",
        "nodes.n1.address=10.0.0.11",
        "trainer.gpus=n0:0-3,n1:0-3",
        "trainer.megatron.tensor_model_parallel_size=4",
        "engines.policy.gpus=n1:4-7",
        'reward.nodes=["n1"]',
        "engines.policy.router=sglang-router",
    )
    nodes = text[text.index("node n0") : text.index("streams")].splitlines()
    assert [line.rstrip() for line in nodes] == [
        "node n0 (home, 10.0.0.10, 8 GPUs)",
        "  nats-server        10.0.0.10, port 4222",
        "  router.policy      10.0.0.10, a free port",
        "  trainer.0-3        GPU 0-3, 1 each",
        "  rollout",
        "  filter",
        "  buffer",
        "node n1 (10.0.0.11, 8 GPUs)",
        "  engine.policy.0-3  GPU 4-7, 1 each; 10.0.0.11, a free port",
        "  trainer.4-7        GPU 0-3, 1 each",
        "  reward.0",
    ]


def test_an_engine_over_two_nodes_is_drawn_on_both() -> None:
    text = drawn(DISAGGREGATE, "trainer.gpus=n0:0-3", "engines.policy.gpus=n0:4-7,n1:4-7", *WIDE)
    of_n0, of_n1 = (text[text.index(f"node {node}") :].split("node ", 2)[1] for node in ("n0", "n1"))
    assert "engine.policy.0    GPU 4-7; auto, a free port" in of_n0
    assert "engine.policy.0.1  GPU 4-7; auto, a free port" in of_n1


def test_an_existing_server_is_named_instead_of_drawn() -> None:
    text = drawn(DISAGGREGATE, "bus.node=none", "bus.url=tls://nats.example:4222")
    assert "bus tls://nats.example:4222" in text
    assert "nats-server" not in text


# Sizes


def test_the_data_stream_holds_the_batches_since_the_last_checkpoint() -> None:
    overrides = ("train.save_interval=50", "train.num_steps=200")
    assert kept_batches(load(LAPTOP, *overrides)) == 50 + 0 + 2
    assert kept_batches(load(LAPTOP, *overrides, "rollout.max_staleness=3")) == 50 + 3 + 2
    assert kept_batches(load(LAPTOP, "train.save_interval=none", "train.num_steps=7")) == 7 + 2


def test_needs_grow_with_over_sampling_and_with_a_filter_that_rejects() -> None:
    least = needed_sizes(load(LAPTOP, "rollout.dynamic_filter=none")).data_bytes
    assert needed_sizes(load(LAPTOP, "rollout.over_sampling_batch_size=128")).data_bytes == 2 * least
    assert needed_sizes(load(LAPTOP, "rollout.dynamic_filter=nonzero_std")).data_bytes == 2 * least


def test_a_limit_that_the_topology_sets_is_kept_and_reaches_the_bus() -> None:
    topology = load(LAPTOP, "bus.data_bytes=1_000_000_000", "bus.max_payload_bytes=16_777_216")
    assert stream_sizes(topology).data_bytes == stream_limits(topology).data_bytes == 1_000_000_000
    assert stream_sizes(topology).max_payload_bytes == 16 * MIB


@pytest.mark.parametrize("path", [LAPTOP, COLOCATE, DISAGGREGATE], ids=lambda path: path.stem)
def test_derived_limits_exceed_what_is_needed(path: Path) -> None:
    topology = load(path)
    sizes, needed = stream_sizes(topology), needed_sizes(topology)
    for name in sizes.__struct_fields__:
        assert getattr(sizes, name) >= getattr(needed, name)


@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 64))
def test_a_full_group_fits_the_room_that_is_reckoned_for_it(response: int, samples: int, prompt: int) -> None:
    topology = load(
        LAPTOP,
        f"rollout.max_response_len={response}",
        f"rollout.n_samples_per_prompt={2 * samples}",
        f"rollout.max_prompt_len={prompt}",
    )
    segments = tuple(
        Segment(
            sample=SampleKey(group_id=10**6, attempt=4, index=index),
            prompt_ids=Int32Array(range(prompt)),
            response_ids=Int32Array(range(response)),
            loss_mask=UInt8Array([1] * response),
            rollout_log_probs=Float32Array([-1.5] * response),
            weight_spans=(WeightSpan(version=10**5, start=0, end=response),),
            text="\\boxed{7}" * response,  # nine bytes for each token
        )
        for index in range(2 * samples)
    )
    message = SegmentsPublished(
        group_id=10**6, attempt=4, lease="x" * 32, segments=segments, prompt="\\boxed{7}" * prompt
    )
    size = len(encode(message).payload)
    assert size <= group_bytes(topology)
    assert size <= stream_sizes(topology).max_payload_bytes
    assert prompt_len_bound(topology) == prompt


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 * MIB, "8 MiB"), (2**40, "1 TiB"), (15 * MIB + 1, "15 MiB")],
)
def test_sizes_are_shown_for_people(size: int, text: str) -> None:
    assert show_bytes(size) == text


def test_the_log_has_room_for_the_steps_that_are_not_archived_yet() -> None:
    """Of steps 10 and 20 the checkpoints are kept: what came before step 10 is archived until that of 30 is saved."""
    assert logged_steps(load(LAPTOP, "train.num_steps=1000", "train.save_interval=10")) == 2 * 10 + 2
    assert logged_steps(load(LAPTOP, "train.num_steps=7", "train.save_interval=10")) == 7
    long, longer = (needed_sizes(load(LAPTOP, f"train.num_steps={n}", "train.save_interval=10")) for n in (500, 5000))
    assert long.event_bytes == longer.event_bytes
