"""Log-probs of given tokens from engines whose model does not change: numbers, checks, lost and silent engines."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest

from actors.rollout.engines.rate_limited_events import RateLimitedEvents
from actors.rollout.pools.answering import AnsweringPool
from actors.rollout.pools.frozen import MAX_FAILURES, FrozenEngine, FrozenPool, PoolSettings
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EnginesUnwilling, RequestRefused
from actors.rollout.sglang.served_model import ServedModel
from messages import SamplingParams
from runtime.bus.bus import Bus
from runtime.util.retrying import Backoff
from tests.build.topology import SCRIPTED_MODEL, topology_with
from tests.support.any_tokens import AnyTokens
from tests.support.scripted_engine import ScriptedEngine, serving
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import all_logits, teacher_forced, write_model

pytestmark = pytest.mark.anyio
PROMPT, RESPONSE = [3, 4, 5], [60, 2, 33, 9, 9, 17]


@asynccontextmanager
async def pool_of(*engines: FrozenEngine, **settings: float) -> AsyncGenerator[FrozenPool]:
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        known = PoolSettings(name="teacher", vocab_size=64, at_once=8, **settings)  # type: ignore[arg-type]
        pool = FrozenPool(known, SglangClient(session), RateLimitedEvents())
        for engine in engines:
            group.start_soon(pool.attend, engine)
        yield pool
        group.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.pools.frozen.RESEND", Backoff(first_s=0.01, max_s=0.01))


def engine_at(url: str) -> FrozenEngine:
    return FrozenEngine("engine.teacher.0", url, None)


async def test_log_probs_equal_a_teacher_forced_forward_of_transformers(tmp_path: Path) -> None:
    write_model(tmp_path, seed=5)
    with running_engine(tmp_path) as engine:
        async with pool_of(engine_at(engine.url)) as pool:
            found = await pool.log_probs("r", PROMPT + RESPONSE, len(PROMPT))
            more = await pool.log_probs("s", PROMPT + RESPONSE, len(PROMPT), topk=5)
    assert found.values.dtype.name == "float32"
    assert found.values.tolist() == pytest.approx(teacher_forced(tmp_path, PROMPT, RESPONSE).tolist(), abs=1e-4)
    assert found[1:] == (None, None)
    values, ids = all_logits(tmp_path, PROMPT, RESPONSE).log_softmax(-1).topk(5)
    assert more.values.tolist() == found.values.tolist()
    assert more.topk_ids is not None
    assert more.topk_log_probs is not None
    assert more.topk_ids.tolist() == ids.flatten().tolist()
    assert more.topk_log_probs.tolist() == pytest.approx(values.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"[[null,5,null],[-0.5,60,null],[null,2,null]]", "token 1 has log-prob null"),
        (b"[[null,5,null],[-0.5,60,null],[0.5,2,null]]", "token 1 has log-prob 0.5 (allowed: finite, at most 0.001)"),
        (b"[[null,5,null],[-0.5,60,null]]", "1 log-probs of 2 tokens"),
        (b"[[null,5,null],[-0.5,60,null],[-0.5,3,null]]", "log-prob 1 is of token 3, not of 2"),
        (b"[[null,5,null],[-0.5,60,null],[-1e999,2,null]]", "unreadable answer"),
        (b'"none"', "unreadable answer"),
    ],
)
async def test_an_impossible_answer_is_refused_with_the_name_of_the_engine(answer: bytes, problem: str) -> None:
    raw = b'{"meta_info":{"finish_reason":{"type":"length"},"input_token_logprobs":' + answer + b"}}"
    scripted = ScriptedEngine(raw_answers={"/generate": raw})
    async with serving(scripted) as engine, pool_of(engine_at(engine.url)) as pool:
        with pytest.raises(RequestRefused) as error:
            await pool.log_probs("r", [*PROMPT, 60, 2], len(PROMPT))
    assert f"engine.teacher.0 ({engine.url}): {MAX_FAILURES} failures" in str(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("top", "problem"),
    [
        (b"[null,[[-0.5,60,null],[-2,0,null]],[[-0.5,2,null]]]", "token 1 has 1 top-k log-probs, not 2"),
        (b"[null,[[-0.5,60,null],[-2,0,null]],null]", "token 1 has 0 top-k log-probs, not 2"),
        (b"[null,[[-0.5,60,null],[-2,0,null]]]", "top-k log-probs at 1 places for 2 tokens"),
        (b"[]", "top-k log-probs at 0 places for 2 tokens"),
        (b"[null,[[-1,5,null],[-2,0,null]],[[-1,2,null],[null,3,null]]]", "token 1 has top-k log-prob nan"),
        (b"[null,[[-1,5,null],[-2,0,null]],[[0.5,2,null],[-1,3,null]]]", "token 1 has top-k log-prob 0.5"),
        (b"[null,[[-1,5,null],[-2,0,null]],[[-1,2,null],[-1,64,null]]]", "token 1 has top-k id 64 (allowed: 0 to 63)"),
        (b"[null,[[-1,-1,null],[-2,0,null]],[[-1,2,null],[-1,4,null]]]", "token 0 has top-k id -1"),
        (b"[null,[[-1,5,null],[-2,0,null]],[[-1,7,null],[-1,7,null]]]", "token 1 has top-k token 7 twice"),
        (b"[null,[[-1,5,null],[-2,0,null]],[[-1,7,null],[-1,4294967296,null]]]", "unreadable answer"),
    ],
)
async def test_impossible_likeliest_tokens_are_refused_with_the_name_of_the_engine(top: bytes, problem: str) -> None:
    given = b'{"meta_info":{"finish_reason":{"type":"length"},"input_token_logprobs":[[null,5,null],[-1,60,null],'
    raw = given + b'[-1,2,null]],"input_top_logprobs":' + top + b"}}"
    async with (
        serving(ScriptedEngine(raw_answers={"/generate": raw})) as engine,
        pool_of(engine_at(engine.url)) as pool,
    ):
        with pytest.raises(RequestRefused) as error:
            await pool.log_probs("r", [*PROMPT, 60, 2], len(PROMPT), topk=2)
    assert f"engine.teacher.0 ({engine.url}): {MAX_FAILURES} failures" in str(error.value)
    assert problem in str(error.value)


async def test_likeliest_tokens_are_of_the_trained_model_too() -> None:
    """A teacher with a larger vocabulary: its padding has no log-prob by the policy."""
    scripted = ScriptedEngine()  # its likeliest tokens are 0 and 1
    async with serving(scripted) as engine, pool_of(engine_at(engine.url), topk_vocab_size=2) as pool:
        assert (await pool.log_probs("r", [*PROMPT, 60], len(PROMPT), topk=2)).topk_ids is not None
    async with serving(scripted) as engine, pool_of(engine_at(engine.url), topk_vocab_size=1) as pool:
        with pytest.raises(RequestRefused, match=r"token 0 has top-k id 1 \(allowed: 0 to 0\)"):
            await pool.log_probs("r", [*PROMPT, 60], len(PROMPT), topk=2)


async def test_tokens_that_would_crash_or_confuse_an_engine_are_not_sent() -> None:
    async with serving(ScriptedEngine()) as engine, pool_of(engine_at(engine.url), confuses_last=True) as pool:
        with pytest.raises(RequestRefused, match=r"engines\.teacher: not sent: token 3 has id 64"):
            await pool.log_probs("r", [*PROMPT, 64], len(PROMPT))
        with pytest.raises(RequestRefused, match="the log-prob of token 0 for 63"):
            await pool.log_probs("r", [*PROMPT, 63], len(PROMPT))
    assert engine.probes == []


async def test_a_request_waits_for_an_engine_that_was_killed_and_comes_back(tmp_path: Path) -> None:
    """Its engine ends while the request is there; another process takes its place at another address."""
    write_model(tmp_path, seed=5)
    gated = ScriptedEngine(probe_at=asyncio.Event())
    found: list[list[float]] = []

    async def ask(pool: FrozenPool) -> None:
        found.append((await pool.log_probs("r", PROMPT + RESPONSE, len(PROMPT))).values.tolist())

    async with pool_of() as pool, anyio.create_task_group() as group:
        async with serving(gated), anyio.create_task_group() as first:
            first.start_soon(pool.attend, engine_at(gated.url))
            group.start_soon(ask, pool)
            with anyio.fail_after(10):
                while not gated.probes:  # noqa: ASYNC110 - the engine has no event for it
                    await anyio.sleep(0.01)
            assert pool.waits_for() == "engines.teacher: 1 request (engine.teacher.0 is up)"
            first.cancel_scope.cancel()
        assert pool.waits_for() == "engines.teacher: 1 request (engine.teacher.0 is away)"
        with running_engine(tmp_path) as engine:
            group.start_soon(pool.attend, engine_at(engine.url))
            with anyio.fail_after(200):
                while not found:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        assert pool.waits_for() == ""
        group.cancel_scope.cancel()
    assert found[0] == pytest.approx(teacher_forced(tmp_path, PROMPT, RESPONSE).tolist(), abs=1e-4)


async def test_without_any_answer_the_run_ends_at_last() -> None:
    async with pool_of(give_up_after_s=0.2) as pool:
        with pytest.raises(EnginesUnwilling, match=r"engines\.teacher answered no request for 0\.2 s"):
            await pool.log_probs("r", PROMPT + RESPONSE, len(PROMPT))


async def test_a_silent_engine_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.rollout.pools.frozen.LOOK_S", 0.2)
    killed: list[str] = []

    async def kill(reason: str) -> None:
        killed.append(reason)
        scripted.probe_at = None

    scripted = ScriptedEngine(probe_at=asyncio.Event())
    async with serving(scripted) as engine:
        slow = FrozenEngine("engine.teacher.0", engine.url, kill)
        async with pool_of(slow, answer_timeout_s=0.2) as pool:
            found = await pool.log_probs("r", PROMPT + RESPONSE, len(PROMPT))
        assert scripted.probe_at is None
    assert len(killed) == 1
    assert "no answer within 0.2 s" in killed[0]
    assert found.values.tolist() == [-0.5] * len(RESPONSE)


async def test_an_external_engine_is_used_once_it_serves_the_model_that_the_pool_names(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.pools.frozen.REFUSED_S", 0.05)
    refused: list[str] = []
    events = RateLimitedEvents()
    monkeypatch.setattr(events, "refused", lambda engine, version, reason: refused.append(f"{engine}: {reason}"))
    scripted = ScriptedEngine(info={"is_generation": False})
    async with serving(scripted) as engine, aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        teacher = {"kind": "sglang", "hf_checkpoint": str(SCRIPTED_MODEL), "urls": [engine.url]}
        topology = topology_with(engines={"policy": {"kind": "tiny"}, "teacher": teacher})
        settings = PoolSettings.of(topology, "teacher")
        assert (settings.at_once, settings.confuses_last) == (64, True)
        pool = FrozenPool(settings, SglangClient(session), events)
        group.start_soon(pool.run, bus, topology)
        with anyio.move_on_after(0.3):
            await pool.log_probs("r", [2, 3, 4], 1)
        assert refused[0].startswith("engines.teacher.urls[0]: ")
        assert "is_generation = False" in refused[0]
        assert scripted.probes == []
        scripted.info = {"dp_size": 2, "dtype": "bfloat16"}  # no weight update has to reach its replicas
        assert (await pool.log_probs("r", [2, 3, 4], 1)).values.tolist() == [-0.5, -0.5]
        group.cancel_scope.cancel()


class Letters(AnyTokens):
    """A model whose token of a letter is its code, moved by some steps."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        super().__init__(lambda text: [ord(letter) - 32 + steps for letter in text])

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + 32 - self.steps) for token in ids)

    def tokens(self) -> dict[str, int]:
        return {letter: ord(letter) - 32 + self.steps for letter in "!#"}


@pytest.mark.parametrize(("steps", "sent", "own"), [(0, [1, 1, 3], [9, 10, 11]), (1, [2, 2, 4], [8, 9])])
async def test_a_turn_of_a_pool_comes_back_in_tokens_of_the_trained_model(
    steps: int, sent: list[int], own: list[int]
) -> None:
    """As they are, or by way of text: then special tokens are left out, and the turn is cut at its limit."""
    scripted = ScriptedEngine(script=lambda prompt, params: [9, 10, 11], text=Letters(steps).decode)
    async with serving(scripted) as engine, pool_of(engine_at(engine.url)) as pool:
        answering = AnsweringPool(pool, Letters(steps), Letters())
        turn = await answering.turn("r", [1, 1, 3], SamplingParams(max_new_tokens=99, temperature=0.5), 3 - steps, 7)
    assert turn == (own, None, Letters().decode(own))
    (request,) = engine.requests
    assert request["input_ids"] == sent
    told = request["sampling_params"]
    assert (told["max_new_tokens"], told["temperature"], told["sampling_seed"]) == (3 - steps, 0.5, 7)
    assert told["skip_special_tokens"] is bool(steps)


def test_without_tokenizers_ids_mean_the_same_in_vocabularies_of_the_same_size(tmp_path: Path) -> None:
    small, other, large = (ServedModel(tmp_path, size, frozenset()) for size in (64, 64, 65))
    assert small.has_tokens_of(other)
    assert not small.has_tokens_of(large)
    assert not Letters().has_tokens_of(small)
    assert not Letters().has_tokens_of(Letters(1))


async def test_an_answer_with_impossible_tokens_is_refused_with_the_name_of_the_engine() -> None:
    scripted = ScriptedEngine(script=lambda prompt, params: [9, 64])
    async with serving(scripted) as engine, pool_of(engine_at(engine.url)) as pool:
        with pytest.raises(RequestRefused, match=rf"engine\.teacher\.0 \({engine.url}\): {MAX_FAILURES} failures.*64"):
            await pool.answer("r", [1], SamplingParams(max_new_tokens=9), 9, 7)
        with pytest.raises(RequestRefused, match="not sent: token 0 has id 64"):
            await pool.answer("r", [64], SamplingParams(max_new_tokens=9), 9, 7)
