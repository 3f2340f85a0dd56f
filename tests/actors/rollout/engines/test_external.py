"""Engines that others run: compared with the recipe, and told to do nothing to what is not ours."""

from typing import Any

import anyio
import pytest

from actors.rollout.engines.external import Wanted, WrongEngine, check_server
from messages import GroupAborted, RoundHalted, WeightsRefused
from runtime.bus.bus import Bus
from tests.support.rollout import announcement, grade, next_event, rollout_actor, task, topology_with, until_applied
from tests.support.scripted_engine import ScriptedEngine, serving

WANTED = Wanted(vocab_size=1000, architectures=("Qwen3ForCausalLM",), dtype="float32", context=512)
RIGHT: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "dtype": "float32",
    "dp_size": 1,
    "context_length": 600,
    "max_total_num_tokens": 16384,
    "is_generation": True,
}


@pytest.mark.parametrize("says", [RIGHT, {}, RIGHT | {"dtype": "auto", "context_length": None}])
def test_one_that_serves_what_is_asked_for_or_does_not_say(says: dict[str, Any]) -> None:
    check_server("http://e", says, WANTED)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures = ['LlamaForCausalLM']; allowed: ['Qwen3ForCausalLM']",
        ),
        ({"vocab_size": 999}, "vocab_size = 999; allowed: 1000, as model.hf_checkpoint has"),
        ({"dtype": "float16"}, "dtype = 'float16'; allowed: float32, as model.dtype"),
        ({"dp_size": 2}, "dp_size = 2; allowed: 1: each replica"),
        ({"context_length": 512}, "context_length = 512; allowed: at least rollout.max_context_len = 512, and 6"),
        ({"max_total_num_tokens": 100}, "context_length = 100; allowed"),
        ({"is_generation": False}, "is_generation = False; allowed: true"),
    ],
)
def test_a_wrong_one_is_named_by_key_value_and_what_is_allowed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongEngine) as raised:
        check_server("http://e", RIGHT | wrong, WANTED)
    assert str(raised.value).startswith("http://e does not serve what the recipe asks for: ")
    assert message in str(raised.value)


def external(engine: ScriptedEngine) -> dict[str, Any]:
    return {"policy": {"kind": "embedded", "concurrency": 8, "urls": [engine.url]}}


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
