"""A second model answers within samples and grades them, beside the one that trains, on SGLang's own servers."""

from pathlib import Path

import anyio
import pytest

from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.pools.answering import AnsweringPool
from actors.rollout.pools.frozen import FrozenEngine, FrozenPool, PoolSettings
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.served_model import ServedModel
from messages import SamplingParams
from tests.chaos.asking import POOL, write_second_model
from tests.chaos.harness import SMALL, Run
from tests.chaos.test_pools import NUM_STEPS, check_two_pools, overrides_of
from tests.sglang.model import VOCAB_SIZE, text_of
from tests.sglang.recipe import RECIPE, overrides
from tests.sglang.rig import Rig
from tests.sglang.server import SHIM, Server, sglang_python

LIMIT_S = 1500
FEW = 6  # tokens of a turn
RESTART_S = 500.0  # of a server, beside other work
SERVER = (  # as tests/sglang/laptop.toml has it for the policy
    f"engines.{POOL}.kind=sglang",
    f"engines.{POOL}.python={sglang_python()}",
    f"engines.{POOL}.concurrency=64",
    f"engines.{POOL}.max_total_tokens=16384",
    f"engines.{POOL}.ready_timeout_s=600.0",
    f"engines.{POOL}.unresponsive_after_s=300.0",
    f'engines.{POOL}.env={{SGLANG_USE_CPU_ENGINE = "1", PYTHONPATH = "{SHIM}", OMP_NUM_THREADS = "1"}}',
    f'engines.{POOL}.sglang={{device = "cpu", attention_backend = "torch_native", sampling_backend = "pytorch", '
    'grammar_backend = "none", disable_overlap_schedule = true, skip_server_warmup = true, sleep_on_idle = true}',
)


@pytest.mark.behaviour(
    "a turn of another model comes back in tokens of the trained model, and as text if its tokens differ"
)
@pytest.mark.anyio
@pytest.mark.timeout(900)
async def test_a_pool_makes_turns(
    rig: Rig, server: Server, client: SglangClient, contract_model: Path, tmp_path: Path
) -> None:
    await rig.update(1)  # weights with which the model ends no answer
    served, other = ServedModel.read(contract_model), ServedModel.read(write_second_model(tmp_path))
    params = SamplingParams(max_new_tokens=FEW, temperature=0.0)
    settings = PoolSettings(name=POOL, vocab_size=VOCAB_SIZE, at_once=8, confuses_last=server.is_sglang)
    async with anyio.create_task_group() as tasks:
        pool = FrozenPool(settings, client, RateLimitedEvents())
        tasks.start_soon(pool.attend, FrozenEngine(f"engine.{POOL}.0", server.url, None))
        same = await AnsweringPool(pool, served, served).turn("same", [2, 3, 4], params, FEW, 7)
        assert (len(same.ids), same.log_probs, same.text) == (FEW, None, text_of(same.ids))
        given = other.encode("abc")
        assert given != [2, 3, 4]
        turn = await AnsweringPool(pool, served, other).turn("other", given, params, FEW, 7)
        assert turn == (other.encode(same.text[:FEW]), None, same.text[:FEW])  # the same text, in more tokens: cut
        with pytest.raises(RequestRefused, match=f"not sent: token 1 has id {VOCAB_SIZE}"):  # it would end SGLang
            await AnsweringPool(pool, served, served).turn("unknown", [2, VOCAB_SIZE], params, FEW, 7)
        assert len((await AnsweringPool(pool, served, served).turn("again", [2, 3, 4], params, FEW, 7)).ids) == FEW
        tasks.cancel_scope.cancel()


@pytest.mark.nightly
@pytest.mark.anyio
@pytest.mark.timeout(LIMIT_S)
async def test_the_engine_of_another_model_and_what_asks_it_are_killed(tmp_path: Path) -> None:
    own = (*overrides(), *SERVER, *overrides_of(tmp_path))
    run = Run(tmp_path, num_steps=NUM_STEPS, eval_interval=None, overrides=own, settings=SMALL, topology=RECIPE)
    await check_two_pools(run, RESTART_S)
