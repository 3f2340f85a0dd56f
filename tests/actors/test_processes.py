"""Which processes a node runs, and how they are started."""

import json
from pathlib import Path

import pytest

from actors.processes import process_specs
from actors.rollout.sglang.peer_weights import PEERS_VARIABLE
from actors.rollout.sglang.server_arguments import LAUNCH
from runtime.settings.load import load_topology
from runtime.settings.processes import ProcessSpec, RestartGroupSpec, SendsHeartbeats, Tier

TWO = ("nodes.local.address=auto", "nodes.b.address=10.0.0.2", "bus.node=local")
TOPOLOGIES = Path(__file__).resolve().parents[2] / "topologies"


def specs(file: str, node: str, *overrides: str) -> dict[str, ProcessSpec]:
    topology = load_topology(TOPOLOGIES / file, overrides).topology
    return {spec.name: spec for spec in process_specs(topology, node, Path("runs/r"))}


def flag(spec: ProcessSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def test_an_engine_is_pinned_to_its_stretch_of_the_ordered_gpus() -> None:
    found = specs("disaggregate-2x8gpu.toml", "n1", "engines.policy.num_gpus_per_engine=2")
    engines = {name: spec for name, spec in found.items() if name.startswith("engine.")}
    assert list(engines) == [f"engine.policy.{index}" for index in range(4)]
    visible = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in engines.values()]
    assert visible == ["0,1", "2,3", "4,5", "6,7"]
    assert {flag(spec, "--tp-size") for spec in engines.values()} == {"2"}


def test_the_router_starts_empty_on_a_port_of_its_own_and_sends_nothing_again() -> None:
    router = specs("laptop.toml", "local", "engines.policy.router=sglang-router")["router.policy"]
    assert not any(part.startswith("--worker-url") for part in router.command)
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(router.command)
    assert (flag(router, "--port"), flag(router, "--log-level")) == ("{port}", "warn")
    assert router.port is not None
    assert router.port.fixed is None


def test_no_engine_is_started_where_running_ones_are_named() -> None:
    found = specs("laptop.toml", "local", 'engines.policy.urls=["http://127.0.0.1:30000"]')
    assert not [name for name in found if name.startswith("engine.")]
    assert "router.policy" not in found


def test_an_engine_of_a_lora_run_may_hold_the_adapters_that_samples_are_of_and_the_next_one() -> None:
    overrides = ("trainer.lora.rank=4", "rollout.max_staleness=2")
    engine = specs("laptop.toml", "local", *overrides)["engine.policy.0"]
    assert "--enable-lora" in engine.command
    assert flag(engine, "--max-lora-rank") == "4"
    assert flag(engine, "--max-loaded-loras") == flag(engine, "--max-loras-per-batch") == "5"  # with the base
    merged = specs("laptop.toml", "local", *overrides, "engines.policy.serve_adapters=false")["engine.policy.0"]
    assert "--enable-lora" not in merged.command


def test_an_sglang_server_of_a_lora_run_knows_the_layers_with_adapters() -> None:
    policy = "engines.policy={kind = 'sglang', serve_adapters = true, sglang = {lora_backend = 'torch_native'}}"
    own = ("trainer.lora.rank=4", "model.random_init=false", policy)
    engine = specs("laptop.toml", "local", *own)["engine.policy.0"]
    assert {"--enable-lora", "--lora-backend"} <= set(engine.command)
    (named,) = [part for part in engine.command if part.startswith("--lora-target-modules=")]
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert json.loads(named.partition("=")[2]) == every
    only = specs("laptop.toml", "local", *own, 'trainer.lora.targets=["q_proj"]')
    assert '--lora-target-modules=["q_proj"]' in only["engine.policy.0"].command


def test_engines_of_a_teacher_serve_its_model_without_a_router() -> None:
    teacher = '{kind = "tiny", hf_checkpoint = "topologies/demo/models/boxed-copy", num_engines = 2}'
    overrides = ("algorithm.opd.type=sglang", f"engines.teacher={teacher}")
    found = specs("laptop.toml", "local", *overrides, "rollout.max_context_len=20")
    teachers = [found[f"engine.teacher.{index}"] for index in range(2)]
    assert "router.teacher" not in found
    assert [spec.critical for spec in teachers] == [False, False]
    for spec in teachers:
        assert flag(spec, "--model-path") == str(TOPOLOGIES / "demo/models/boxed-copy")
        assert flag(spec, "--load-format") == "auto"
    assert flag(found["engine.policy.0"], "--load-format") == "dummy"
    lengths = [int(flag(found[f"engine.{pool}.0"], "--context-length")) for pool in ("policy", "teacher")]
    assert lengths[1] == lengths[0] + 1  # whole samples are its input


def test_arguments_of_the_sglang_table_are_passed_through() -> None:
    engine = specs(
        "disaggregate-2x8gpu.toml",
        "n1",
        "engines.policy.python=/opt/sglang/bin/python",
        "engines.policy.sglang={mem_fraction_static = 0.7, disable_radix_cache = true, enable_lora = false}",
    )["engine.policy.0"]
    assert engine.command[:3] == ("/opt/sglang/bin/python", LAUNCH, "sglang.launch_server")
    assert flag(engine, "--mem-fraction-static") == "0.7"
    assert "--disable-radix-cache" in engine.command
    assert "--enable-lora" not in engine.command


def test_an_engine_that_may_take_its_first_weights_from_a_peer_is_told_of_those_that_are_ready() -> None:
    pool = ("engines.policy.start_weights=peer", "engines.policy.verify=always")
    assert specs("disaggregate-2x8gpu.toml", "n1", *pool)["engine.policy.0"].env[PEERS_VARIABLE] == "{others}"
    assert PEERS_VARIABLE not in specs("disaggregate-2x8gpu.toml", "n1")["engine.policy.0"].env


def test_engines_compute_in_the_format_of_their_weights() -> None:
    kind = ("engines.policy.kind=sglang", "model.dtype=float32")
    assert flag(specs("laptop.toml", "local", *kind)["engine.policy.0"], "--dtype") == "float32"
    cast = specs("laptop.toml", "local", *kind, "engines.policy.weight_format=bfloat16")["engine.policy.0"]
    assert flag(cast, "--dtype") == "bfloat16"
    assert "--quantization" not in cast.command


def test_an_engine_for_fp8_is_told_what_its_models_config_does_not_say() -> None:
    engine = specs(
        "single-gpu.toml",
        "local",
        "engines.policy.weight_format=fp8",
        "engines.policy.sglang.json_model_override_args={max_position_embeddings = 512}",
    )["engine.policy.0"]
    assert (flag(engine, "--dtype"), flag(engine, "--quantization")) == ("bfloat16", "fp8")
    assert flag(engine, "--load-format") == "dummy"  # its files have no scales
    (told,) = [word for word in engine.command if word.startswith("--json-model-override-args=")]
    assert json.loads(told.partition("=")[2]) == {
        "max_position_embeddings": 512,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    }


def test_engines_of_the_trained_model_leave_out_the_keys_of_its_config_that_the_topology_ignores() -> None:
    ignored = 'model.ignore_config_keys=["is_causal", "quantization_config"]'
    teacher = ("algorithm.opd.type=sglang", "engines.teacher={kind='tiny', hf_checkpoint='.'}")
    found = specs("laptop.toml", "local", ignored, *teacher)
    command = found["engine.policy.0"].command
    first = command.index("--ignore-config-keys")
    assert command[first + 1 : first + 4] == ("is_causal", "quantization_config", "--host")
    assert "--ignore-config-keys" not in found["engine.teacher.0"].command
    own = "engines.policy.sglang.json_model_override_args={max_position_embeddings = 512}"
    engine = engines_of("local", ignored, own, file="disaggregate-8gpu.toml")
    (told,) = [word for word in next(iter(engine.values())).command if word.startswith("--json-model-override-args=")]
    assert json.loads(told.partition("=")[2]) == {
        **{"is_causal": True, "quantization_config": None},  # what transformers takes without the keys
        "max_position_embeddings": 512,
    }


def test_engines_of_a_quantized_directory_wait_for_the_trainers_weights(tmp_path: Path) -> None:
    model = {"model_type": "qwen3", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    here = f"model.hf_checkpoint={tmp_path}"
    tiny = specs("laptop.toml", "local", here, "model.random_init=false")["engine.policy.0"]
    assert flag(tiny, "--load-format") == "dummy"
    engine = next(iter(engines_of("local", here, file="disaggregate-8gpu.toml").values()))
    assert flag(engine, "--load-format") == "dummy"
    (told,) = [word for word in engine.command if word.startswith("--json-model-override-args=")]
    assert json.loads(told.partition("=")[2]) == {"quantization_config": None}
    in_fp8 = specs("single-gpu.toml", "local", here, "engines.policy.weight_format=fp8")["engine.policy.0"]
    (told,) = [word for word in in_fp8.command if word.startswith("--json-model-override-args=")]
    assert json.loads(told.partition("=")[2])["quantization_config"]["quant_method"] == "fp8"


def test_engines_stream_what_is_new_in_large_chunks_unless_the_topology_says_otherwise() -> None:
    for topology, node in (("laptop.toml", "local"), ("disaggregate-2x8gpu.toml", "n1")):
        engine = specs(topology, node)["engine.policy.0"]
        assert flag(engine, "--stream-interval") == "64"
        assert "--incremental-streaming-output" in engine.command
    other = "engines.policy.sglang={stream_interval = 8, incremental_streaming_output = false}"
    engine = specs("disaggregate-2x8gpu.toml", "n1", other)["engine.policy.0"]
    assert flag(engine, "--stream-interval") == "8"
    assert "--incremental-streaming-output" not in engine.command


def test_engines_of_both_kinds_are_told_the_seed_of_the_run_and_its_limits() -> None:
    limits = ("run.seed=7", "engines.policy.max_total_tokens=9000", "rollout.max_context_len=4000")
    for topology, node, more in (
        ("laptop.toml", "local", "engines.policy.num_engines=2"),
        ("disaggregate-2x8gpu.toml", "n1", "engines.policy.num_gpus_per_engine=4"),
    ):
        found = specs(topology, node, *limits, more)
        engines = [found[f"engine.policy.{index}"] for index in range(2)]
        assert [flag(engine, "--random-seed") for engine in engines] == ["7", "8"]
        assert {flag(engine, "--max-total-tokens") for engine in engines} == {"9000"}
        assert {flag(engine, "--context-length") for engine in engines} == {"4006"}  # 6 are kept free


def test_an_engine_of_several_processes_has_a_share_of_its_gpus_in_each_and_one_address() -> None:
    engines = {
        name: spec
        for name, spec in specs(
            "disaggregate-2x8gpu.toml", "n1", "engines.policy.num_gpus_per_engine=4", "engines.policy.num_processes=2"
        ).items()
        if name.startswith("engine.")
    }
    assert list(engines) == ["engine.policy.0", "engine.policy.0.1", "engine.policy.1", "engine.policy.1.1"]
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in engines.values()] == ["0,1", "2,3", "4,5", "6,7"]
    assert [flag(spec, "--node-rank") for spec in engines.values()] == ["0", "1", "0", "1"]
    assert {(flag(spec, "--nnodes"), flag(spec, "--tp-size")) for spec in engines.values()} == {("2", "4")}
    assert all("--dist-init-addr={peers}" in spec.command for spec in engines.values())
    assert [spec.address_key is not None for spec in engines.values()] == [True, False, True, False]
    servers = [spec.restart_group.name for spec in engines.values() if spec.restart_group is not None]
    assert servers == ["engine.policy.0", "engine.policy.0", "engine.policy.1", "engine.policy.1"]


def engines_of(node: str, *overrides: str, file: str = "disaggregate-2x8gpu.toml") -> dict[str, ProcessSpec]:
    return {name: spec for name, spec in specs(file, node, *overrides).items() if name.startswith("engine.")}


def test_an_engine_over_several_nodes_has_a_process_with_its_own_gpus_on_each() -> None:
    lists = ("trainer.gpus=n0:0-3", "engines.policy.gpus=n0:4-7,n1:0-7", "engines.policy.num_gpus_per_engine=4")
    alone = engines_of("n1", *lists)
    assert [(name, spec.restart_group) for name, spec in alone.items()] == [
        ("engine.policy.1", None),
        ("engine.policy.2", None),
    ]
    lists = (*lists[:1], "engines.policy.gpus=n0:4-7,n1:2-5", "engines.policy.num_gpus_per_engine=8")
    ((first, serving),), ((second, other),) = engines_of("n0", *lists).items(), engines_of("n1", *lists).items()
    assert (first, second) == ("engine.policy.0", "engine.policy.0.1")
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in (serving, other)] == ["4,5,6,7", "2,3,4,5"]
    assert [flag(spec, "--node-rank") for spec in (serving, other)] == ["0", "1"]
    assert {(flag(spec, "--nnodes"), flag(spec, "--tp-size")) for spec in (serving, other)} == {("2", "8")}
    assert {spec.restart_group for spec in (serving, other)} == {RestartGroupSpec(first, 1, ("n0", "n1"))}
    assert [spec.address_key is not None for spec in (serving, other)] == [True, False]


def test_processes_of_an_engine_have_equally_many_gpus_whatever_its_nodes_have() -> None:
    lists = ("trainer.gpus=n0:0-3", "engines.policy.gpus=n0:4-7,n1:0-7", "nodes.n2.gpus=4", "nodes.n2.address=n2")
    wide = (lists[0], "engines.policy.gpus=n1:0-7,n2:0-3,n0:4-7", "engines.policy.num_gpus_per_engine=16", *lists[2:])
    found = {node: engines_of(node, *wide) for node in ("n0", "n1", "n2")}
    gpus = {name: spec.env["CUDA_VISIBLE_DEVICES"] for of in found.values() for name, spec in of.items()}
    assert gpus == {
        "engine.policy.0": "4,5,6,7",
        "engine.policy.0.1": "0,1,2,3",
        "engine.policy.0.2": "4,5,6,7",
        "engine.policy.0.3": "0,1,2,3",
    }
    assert [len(of) for of in found.values()] == [1, 2, 1]
    groups = {spec.restart_group for spec in found["n1"].values()}
    assert groups == {RestartGroupSpec("engine.policy.0", 2, ("n0", "n1", "n2"))}


def test_engines_on_the_cpu_take_their_nodes_in_turn_several_each() -> None:
    placed = (
        *TWO,
        "nodes.c.address=10.0.0.3",
        "engines.policy.kind=sglang",
        "engines.policy.num_engines=2",
        "engines.policy.num_processes=2",
        "engines.policy.num_nodes_per_engine=2",
        "engines.policy.nodes=['b','local','c']",
    )
    found = {node: list(engines_of(node, *placed, file="laptop.toml")) for node in ("local", "b", "c")}
    assert found == {
        "b": ["engine.policy.0", "engine.policy.1.1"],
        "local": ["engine.policy.0.1"],
        "c": ["engine.policy.1"],
    }


def test_an_engine_has_as_long_to_start_as_its_pool_says() -> None:
    for topology, node, default_s in (("laptop.toml", "local", 120), ("disaggregate-2x8gpu.toml", "n1", 1800)):
        assert specs(topology, node)["engine.policy.0"].ready_timeout_s == default_s
        longer = specs(topology, node, "engines.policy.ready_timeout_s=4000")
        assert longer["engine.policy.0"].ready_timeout_s == 4000


def test_actors_that_share_a_process_are_started_together() -> None:
    filtered = "rollout.dynamic_filter=nonzero_std"
    found = specs("laptop.toml", "local", 'share=[["reward", "filter"]]', filtered)
    assert found["reward+filter"].command[-2:] == ("reward", "filter")
    assert not {"reward", "filter"} & set(found)
    assert {"rollout", "buffer"} <= set(found)


@pytest.mark.parametrize("name", [None, "none"])
def test_a_recipe_that_keeps_every_group_has_no_filter_process(name: str | None) -> None:
    overrides = () if name is None else (f"rollout.dynamic_filter={name}",)
    assert "filter" not in specs("laptop.toml", "local", *overrides)
    shared = specs("laptop.toml", "local", 'share=[["reward", "filter"], ["buffer"]]', *overrides)
    assert shared["reward"].command[-1] == "reward"
    assert not [spec for spec in shared.values() if "filter" in spec.command]
    alone = specs("laptop.toml", "local", 'share=[["filter"]]', *overrides)
    assert {*alone} == {*specs("laptop.toml", "local")}


@pytest.mark.parametrize("name", ["nonzero_std", "filters.py:mine"])
def test_a_recipe_with_a_filter_has_a_filter_process(name: str, tmp_path: Path) -> None:
    (tmp_path / "filters.py").write_text("def mine(group):\n    return True\n")
    name = name.replace("filters.py", str(tmp_path / "filters.py"))
    found = specs("laptop.toml", "local", f"rollout.dynamic_filter={name}")
    assert found["filter"].command[-1] == "filter"


def test_what_computes_on_the_cpu_sees_no_gpu_whatever_the_machine_has() -> None:
    found = specs("laptop.toml", "local")
    on_cpu = [spec for name, spec in found.items() if name.startswith(("trainer", "engine."))]
    assert len(on_cpu) >= 2
    no_op = specs("laptop.toml", "local", "run.only=rollout")["no-op-trainer"]
    for spec in (*on_cpu, no_op):
        assert (spec.env["CUDA_VISIBLE_DEVICES"], spec.env["HIP_VISIBLE_DEVICES"]) == ("", "")


def test_a_dying_server_of_sglang_waits_for_no_diagnostics_unless_its_pool_says_so() -> None:
    names = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
    env = specs("disaggregate-2x8gpu.toml", "n1")["engine.policy.0"].env
    assert [env[name] for name in names] == ["false", "false"]
    wanted = "engines.policy.env={SGLANG_PYSPY_DUMP_BEFORE_CRASH = 'true'}"
    env = specs("disaggregate-2x8gpu.toml", "n1", wanted)["engine.policy.0"].env
    assert [env[name] for name in names] == ["true", "false"]
    assert not {*names} & {*specs("laptop.toml", "local")["engine.policy.0"].env}


def test_engines_without_gpus_are_assigned_to_the_nodes_of_their_pool_in_turn() -> None:
    placed = (*TWO, "engines.policy.num_engines=3", "engines.policy.nodes=['b','local']")
    assert [name for name in specs("laptop.toml", "local", *placed) if name.startswith("engine")] == ["engine.policy.1"]
    assert list(specs("laptop.toml", "b", *placed)) == ["engine.policy.0", "engine.policy.2"]


def test_ranks_run_where_their_gpus_are_however_many_a_node_has() -> None:
    lists = ("trainer.gpus=n0:4-7,n1:0-7", "engines.policy.gpus=n0:0-3", "rollout.rollout_batch_size=24")
    found = {node: specs("disaggregate-2x8gpu.toml", node, *lists) for node in ("n0", "n1")}
    ranks = {node: [spec for name, spec in of.items() if name.startswith("trainer.")] for node, of in found.items()}
    assert [(spec.env["RANK"], spec.env["CUDA_VISIBLE_DEVICES"]) for spec in ranks["n0"]] == [
        ("0", "4"),
        ("1", "5"),
        ("2", "6"),
        ("3", "7"),
    ]
    assert [spec.env["RANK"] for spec in ranks["n1"]] == [str(rank) for rank in range(4, 12)]
    assert {spec.env["WORLD_SIZE"] for spec in ranks["n0"] + ranks["n1"]} == {"12"}
    groups = {node: {spec.restart_group for spec in each} for node, each in ranks.items()}
    assert groups["n0"] == {RestartGroupSpec("trainer", 4, ("n0", "n1"))}
    assert groups["n1"] == {RestartGroupSpec("trainer", 8, ("n0", "n1"))}


def test_ranks_on_the_cpu_are_dealt_to_their_nodes_in_blocks() -> None:
    placed = (*TWO, "trainer.num_processes=4", "trainer.nodes=['b','local']")
    of_b, at_home = specs("laptop.toml", "b", *placed), specs("laptop.toml", "local", *placed)
    assert list(of_b) == ["trainer.0", "trainer.1"]
    assert [name for name in at_home if name.startswith("trainer")] == ["trainer.2", "trainer.3"]
    assert of_b["trainer.0"].restart_group == RestartGroupSpec("trainer", 2, ("b", "local"))
    alone = specs("laptop.toml", "b", *TWO, "trainer.num_processes=2", "trainer.nodes=['b']")
    assert alone["trainer.0"].restart_group == RestartGroupSpec("trainer", 2)


def test_a_critic_with_ranks_of_its_own_has_processes_after_those_of_the_actor_in_one_restart_group() -> None:
    gpus = ("trainer.gpus=n0:0-3", "engines.policy.gpus=n0:4-7", "trainer.critic.gpus=n1:2-3")
    own = ("algorithm.estimator.type=ppo", *gpus)
    found = {node: specs("disaggregate-2x8gpu.toml", node, *own) for node in ("n0", "n1")}
    ranks = {
        node: {name: spec for name, spec in of.items() if name.startswith("trainer")} for node, of in found.items()
    }
    assert list(ranks["n0"]) == [f"trainer.{number}" for number in range(4)]
    assert {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in ranks["n1"].items()} == {
        "trainer.4": "2",
        "trainer.5": "3",
    }
    assert {spec.env["WORLD_SIZE"] for of in ranks.values() for spec in of.values()} == {"6"}
    groups = {node: {spec.restart_group for spec in of.values()} for node, of in ranks.items()}
    assert groups["n0"] == {RestartGroupSpec("trainer", 4, ("n0", "n1"))}
    assert groups["n1"] == {RestartGroupSpec("trainer", 2, ("n0", "n1"))}


def test_each_node_of_reward_has_a_reward_actor() -> None:
    assert "reward" in specs("laptop.toml", "local", *TWO)
    assert not specs("laptop.toml", "b", *TWO)
    placed = (*TWO, "reward.nodes=['b','local']")
    assert list(specs("laptop.toml", "b", *placed)) == ["reward.0"]
    assert [name for name in specs("laptop.toml", "local", *placed) if name.startswith("reward")] == ["reward.1"]


def test_each_node_with_a_rollout_actor_has_a_listener_for_agents_and_holds_programs_if_there_are_any() -> None:
    agent = "rollout.agent={command = ['a'], sandbox = 'none'}"
    prompts = ("data.0.apply_chat_template=false",)
    assert "sessions" not in specs("laptop.toml", "local")
    found = specs("laptop.toml", "local", agent, *prompts)["sessions"]
    assert found.command[1:4] == ("-P", "-m", "actors.sessions")
    assert json.loads(found.command[4])["num_actors"] == 1
    programs = specs("laptop.toml", "local", agent, *prompts)["programs"]
    assert (programs.command[1:], programs.tier) == (("-P", "-m", "actors.sessions.programs", "{}"), Tier.SERVICE)
    assert found.probe == programs.probe == SendsHeartbeats()  # one that stands still is named, and started again
    two = ("engines.policy.num_engines=2", "rollout.nodes=['local','local']")
    assert json.loads(specs("laptop.toml", "local", agent, *prompts, *two)["sessions"].command[4])["num_actors"] == 2
