"""Engines that others run: compared with the recipe, and told to do nothing to what is not ours."""

import json
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from actors.rollout.engines.checks import ServerRequirements, WrongEngine, check_server
from actors.rollout.engines.weights.updater import Pauses
from actors.rollout.sglang.errors import EngineUnavailable
from messages import GroupAborted, RoundHalted, WeightsApplied, WeightsRefused
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.kv import Entry, KeyValues
from runtime.settings.topology import Topology
from tests.build.topology import topology_with
from tests.fixtures.nats import eventually
from tests.support.rollout import announcement, grade, next_event, rollout_actor, task, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

WANTED = ServerRequirements(architectures=("Qwen3ForCausalLM",), dtype="float32", context=512)
RIGHT: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "float32",
    "dp_size": 1,
    "max_req_input_len": 512,
    "is_generation": True,
}


@pytest.mark.parametrize("says", [RIGHT, {}, RIGHT | {"dtype": "auto", "max_req_input_len": None}])
def test_one_that_serves_what_is_asked_for_or_does_not_say(says: dict[str, Any]) -> None:
    check_server("http://e", says, WANTED)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures = ['LlamaForCausalLM']; allowed: ['Qwen3ForCausalLM']",
        ),
        ({"dtype": "float16"}, "dtype = 'float16'; allowed: float32, from model.dtype"),
        ({"dp_size": 2}, "dp_size = 2; allowed: 1: each replica"),
        ({"max_req_input_len": 511}, "max_req_input_len = 511; allowed: at least rollout.max_context_len = 512"),
        ({"is_generation": False}, "is_generation = False; allowed: true"),
    ],
)
def test_a_wrong_one_is_named_by_key_value_and_what_is_allowed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongEngine) as raised:
        check_server("http://e", RIGHT | wrong, WANTED)
    assert str(raised.value).startswith("http://e does not fit the recipe: ")
    assert message in str(raised.value)


def external(engine: ScriptedEngine) -> dict[str, Any]:
    return {"policy": {"kind": "tiny", "concurrency": 8, "urls": [engine.url]}}


def test_one_with_a_prefix_cache_is_wrong_for_updates_in_place() -> None:
    in_place = WANTED._replace(keeps_prefixes=False)
    for says in (RIGHT, RIGHT | {"disable_radix_cache": True}):
        check_server("http://e", says, in_place)
    with pytest.raises(WrongEngine, match=r"disable_radix_cache = False; allowed: true with rollout\.on_weight_update"):
        check_server("http://e", RIGHT | {"disable_radix_cache": False}, in_place)
    check_server("http://e", RIGHT | {"disable_radix_cache": False}, WANTED)


def test_one_that_serves_quantized_weights_is_wrong_where_updates_are_not_quantized() -> None:
    wanted, says = WANTED._replace(quantized="models/deepseek"), RIGHT | {"model_path": "models/deepseek"}
    for overrides in ('{"quantization_config": null}', '{"quantization_config": {}, "rope_theta": 1}'):
        check_server("http://e", says | {"json_model_override_args": overrides}, wanted)
    check_server("http://e", RIGHT | {"model_path": "models/unquantized"}, wanted)
    check_server("http://e", says, WANTED)
    for overrides in ("{}", None, "{", '{"quantization_config": {"quant_method": "fp8"}}'):
        with pytest.raises(WrongEngine, match=r'json_model_override_args = .*; allowed: {"quantization_config": null}'):
            check_server("http://e", says | {"json_model_override_args": overrides}, wanted)


@pytest.mark.parametrize(("weight_format", "expected"), [("as_trained", True), ("bfloat16", True), ("fp8", False)])
def test_what_must_not_be_quantized_follows_from_the_form_of_updates(
    tmp_path: Path, weight_format: str, expected: bool
) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = {"kind": "sglang", "urls": ["http://e"], "weight_format": weight_format}
    model = {"hf_checkpoint": str(tmp_path), "dtype": "bfloat16"}
    topology = topology_with(engines={"policy": policy}, model=model)
    found = ServerRequirements.by(topology, topology.engines["policy"])
    assert found.quantized == (str(tmp_path) if expected else "")


@pytest.mark.anyio
async def test_a_wrong_one_is_told_and_gets_no_weights(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine(info={"dp_size": 2})) as engine:
        async with rollout_actor(bus, router_url, [], topology_with(engines=external(engine))):
            await bus.publish(announcement(1))
            refused, _ = await next_event(bus, WeightsRefused)
    assert isinstance(refused, WeightsRefused)
    assert "dp_size = 2; allowed: 1" in refused.reason
    assert engine.calls == []


@pytest.mark.anyio
@pytest.mark.parametrize("ours", [True, False])
async def test_a_halt_aborts_by_name_where_others_have_requests(bus: Bus, router_url: str, ours: bool) -> None:
    engine = ScriptedEngine(hold=True)
    async with serving(engine), anyio.create_task_group() as group:
        group.start_soon(grade, bus)
        topology = topology_with() if ours else topology_with(engines=external(engine))
        async with rollout_actor(bus, router_url, [engine] if ours else [], topology):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
            await bus.publish(task(0))
            await engine.wait_for_requests(2)
            await bus.publish(RoundHalted(incarnation=1, round=0))
            await next_event(bus, GroupAborted)
        group.cancel_scope.cancel()
    if ours:
        assert {"abort_all": True} in engine.aborts
    else:
        assert {body["rid"] for body in engine.aborts} == {body["rid"] for body in engine.requests}


def in_place(engine: ScriptedEngine) -> Topology:
    return topology_with(rollout={"on_weight_update": "in_place", "max_staleness": 1}, engines=external(engine))


@pytest.mark.anyio
async def test_one_that_a_dead_actor_has_left_paused_is_continued_by_the_next(bus: Bus, router_url: str) -> None:
    async with serving(ScriptedEngine(fails_to_continue=1_000_000)) as engine:
        async with rollout_actor(bus, router_url, [], in_place(engine)):
            await bus.publish(announcement(1))
            await eventually(lambda: engine.calls == ["in_place", "update"])
        assert engine.paused
        engine.fails_to_continue = 0
        async with rollout_actor(bus, router_url, [], in_place(engine)):
            await until_applied(bus, 1)
    assert engine.calls[2] == "continue"


@pytest.mark.anyio
async def test_one_that_others_paused_is_left_so_by_an_actor_whose_predecessor_paused_it_before(
    bus: Bus, router_url: str
) -> None:
    async with serving(ScriptedEngine()) as engine:
        async with rollout_actor(bus, router_url, [], in_place(engine)):
            await bus.publish(announcement(1))
            await until_applied(bus, 1)
        assert engine.calls == ["in_place", "update", "continue"]
        engine.paused = True  # by somebody else
        async with rollout_actor(bus, router_url, [], in_place(engine)), bus.read(WeightsApplied) as events:
            assert await events.next(10) is not None  # of the first actor
            assert await events.next(1) is None
    assert engine.calls == ["in_place", "update", "continue"]


class Bucket:
    """A run's bucket that can be away."""

    def __init__(self) -> None:
        self.values: dict[str, bool] = {}
        self.away = False

    async def get(self, key: str, _type: object) -> Entry[bool] | None:
        return Entry(key, self.values[key], 1) if key in self.values else None

    async def put(self, key: str, value: bool) -> int:
        if self.away:
            raise BusUnavailable("no server")
        self.values[key] = value
        return 1


@pytest.mark.anyio
async def test_a_pause_is_noted_before_it_begins_until_it_has_ended() -> None:
    bucket = Bucket()
    pauses = Pauses(cast(KeyValues, bucket), "policy", ["http://a", "http://b"])
    for url in ("http://b", "http://a", "http://ours"):
        await pauses.begin(url)
    assert len(bucket.values) == 2  # each external engine has a key of its own
    assert all(key.startswith("paused.policy.") and noted for key, noted in bucket.values.items())
    await pauses.end("http://a")
    bucket.away = True
    with pytest.raises(
        EngineUnavailable, match="http://a: not paused, because the pause could not be recorded: no server"
    ):
        await pauses.begin("http://a")
    assert [url in pauses for url in ("http://a", "http://b", "http://ours")] == [False, True, True]
    await pauses.end("http://b")
    later = Pauses(cast(KeyValues, bucket), "policy", ["http://b", "http://c"])
    await later.inherit()
    assert [url in later for url in ("http://a", "http://b", "http://c")] == [False, True, False]
