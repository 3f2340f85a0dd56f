"""A conversation without a rollout actor: halts and replays, the sampling of its turns, grades, and rewards."""

import contextlib
import re
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.sample import OpenSample, Turn
from actors.rollout.sglang.errors import EngineUnavailable
from messages import (
    SampleKey,
    SampleStatus,
    SamplingParams,
)
from runtime.bus.errors import BusError
from tests.support.any_tokens import AnyTokens
from tests.support.rollout import task

pytestmark = pytest.mark.anyio


def two_turns() -> OpenSample:
    """A sample of two turns that ended, carried on from an earlier attempt."""
    turns = [Turn(num_tokens=1, text="a"), Turn(num_tokens=1, text="b")]
    return OpenSample(index=0, prompt_len=2, turns=turns, metadata={"num_turns": 2})


async def ask_nobody(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
    raise AssertionError("an engine was asked")


@pytest.mark.parametrize(
    ("num_tokens", "turn_status", "end", "status"),
    [
        (4, SampleStatus.TRUNCATED, "", SampleStatus.TRUNCATED),
        (4, SampleStatus.TRUNCATED, "completed", SampleStatus.COMPLETED),
        (4, SampleStatus.COMPLETED, "", SampleStatus.COMPLETED),  # its last token ended it
        (3, SampleStatus.TRUNCATED, "", SampleStatus.COMPLETED),  # the function's own limit
    ],
)
async def test_a_sample_whose_last_turn_fills_the_room_is_truncated_unless_the_function_says_otherwise(
    num_tokens: int, turn_status: SampleStatus, end: str, status: SampleStatus
) -> None:
    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        assert limit == num_tokens
        sample.buffer.append(np.arange(num_tokens), np.zeros(num_tokens), "text", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), task(0).prompt.prompt_ids)
        sample.turn_status = turn_status
        return False

    async def talks(talk: Conversation) -> None:
        await talk.generate(max_new_tokens=num_tokens)
        if end:
            talk.end(end)

    sample, params = OpenSample(index=0, prompt_len=2), SamplingParams(max_new_tokens=4)
    talk = Conversation(task(0).prompt, sample, params=params, ask=ask, model=AnyTokens())
    assert await talk.run(talks) is status


async def test_a_service_that_fills_the_room_is_not_taken_to_be_cut_off() -> None:
    async def keep(sample: OpenSample) -> None:
        sample.take(SampleKey(group_id=0, attempt=0, index=0), task(0).prompt.prompt_ids)

    async def talks(talk: Conversation) -> None:
        async def service(ids: list[int]) -> tuple[list[int], list[float], str]:
            return [1, 2, 3, 4], [-1.0] * 4, "text"

        await talk.generate_by(service)

    sample, params = OpenSample(index=0, prompt_len=2), SamplingParams(max_new_tokens=4)
    talk = Conversation(task(0).prompt, sample, params=params, ask=ask_nobody, model=AnyTokens(), keep=keep)
    assert await talk.run(talks) is SampleStatus.COMPLETED


async def test_a_replay_that_is_halted_forgets_no_turn() -> None:
    reached = anyio.Event()

    async def waits_between_turns(talk: Conversation) -> None:
        await talk.generate()
        reached.set()
        await anyio.sleep_forever()

    sample = two_turns()
    talk = Conversation(
        task(0).prompt, sample, params=SamplingParams(max_new_tokens=9), ask=ask_nobody, model=AnyTokens()
    )
    async with anyio.create_task_group() as group:

        async def run() -> None:
            assert await talk.run(waits_between_turns) is SampleStatus.ABORTED

        group.start_soon(run)
        await reached.wait()
        assert sample.metadata["num_turns"] == 2  # so a spill says, too
        talk.halt()
    assert sample.metadata["num_turns"] == 2


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("waits", SampleStatus.ABORTED),
        ("catches the cancellation", SampleStatus.ABORTED),
        ("ends", SampleStatus.COMPLETED),
    ],
)
async def test_a_halt_during_a_turn_ends_the_function_where_it_next_waits(then: str, status: SampleStatus) -> None:
    sample = OpenSample(index=0, prompt_len=2)

    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        talk.halt()
        sample.turn_status = SampleStatus.COMPLETED
        return False

    async def function(talk: Conversation) -> None:
        await talk.generate()
        with contextlib.suppress(BaseException if then == "catches the cancellation" else ValueError):
            if then != "ends":
                await anyio.sleep_forever()

    talk = Conversation(task(0).prompt, sample, params=SamplingParams(max_new_tokens=9), ask=ask, model=AnyTokens())
    with anyio.fail_after(200):
        assert await talk.run(function) is status
    assert sample.metadata["num_turns"] == 1


class Answers:
    """An engine whose first calls do what a test says. All others answer with one token."""

    def __init__(self, *calls: str) -> None:
        self.calls = list(calls)
        self.params: list[SamplingParams] = []  # of its requests
        self.asked = anyio.Event()

    async def __call__(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        call = self.calls.pop(0) if self.calls else "answers"
        self.params.append(params)
        if call == "fails":
            raise EngineUnavailable("no engine")
        if call != "hangs":
            await self.keep(sample)
        if call != "answers":
            self.asked.set()
            await anyio.sleep_forever()
        sample.turn_status = SampleStatus.COMPLETED
        return False

    async def keep(self, sample: OpenSample) -> None:
        sample.buffer.append_input(sample.pending)
        sample.buffer.append(np.array([5]), np.array([-1.0]), "e", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), sample.prompt_of(task(0).prompt.prompt_ids))


def conversation(answers: Answers, *, max_tokens: int = 9, limit_s: float = 5.0) -> tuple[Conversation, OpenSample]:
    sample = OpenSample(index=0, prompt_len=2)
    talk = Conversation(
        task(0).prompt,
        sample,
        params=SamplingParams(max_new_tokens=max_tokens),
        ask=answers,
        model=AnyTokens(),
        keep=answers.keep,
        limit_s=limit_s,
    )
    return talk, sample


async def waits_after_a_turn_that_it_gave_up(talk: Conversation) -> None:
    with anyio.move_on_after(0.01):
        await talk.generate()
    await anyio.sleep_forever()


@pytest.mark.parametrize("call", ["hangs", "begins"])
async def test_after_a_turn_that_a_function_gave_up_its_time_counts_again(call: str) -> None:
    talk, _ = conversation(Answers(call), limit_s=0.05)
    with anyio.fail_after(200), pytest.raises(ValueError, match=r"took more than 0\.05 s outside of generate"):
        await talk.run(waits_after_a_turn_that_it_gave_up)


async def test_a_halt_during_a_turn_that_is_given_up_ends_the_function() -> None:
    answers = Answers("hangs")
    talk, _ = conversation(answers)
    with anyio.fail_after(200):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                assert await talk.run(waits_after_a_turn_that_it_gave_up) is SampleStatus.ABORTED

            group.start_soon(run)
            await answers.asked.wait()
            talk.halt()


async def test_a_turn_that_was_cut_off_goes_on() -> None:
    """Otherwise the sample would end in the middle of it."""

    async def goes_on(talk: Conversation) -> None:
        with anyio.move_on_after(0.01):
            await talk.generate()
        if waits:
            assert await talk.generate() == "ee"

    waits = True
    talk, sample = conversation(Answers("begins"))
    assert await talk.run(goes_on) is SampleStatus.COMPLETED
    assert sample.buffer.ids.tolist() == [5, 5]
    waits = False
    talk, _ = conversation(Answers("begins"))
    with pytest.raises(ValueError, match="ended in the middle of a turn"):
        await talk.run(goes_on)


async def test_a_turn_whose_call_failed_has_not_begun() -> None:
    async def service(ids: list[int]) -> tuple[list[int], list[float]]:
        if len(ids) == 2:
            raise OSError("no service")
        raise AssertionError

    async def uses_what_answers(talk: Conversation) -> None:
        with pytest.raises(OSError, match="no service"):
            await talk.generate_by(service)
        with pytest.raises(EngineUnavailable):
            await talk.generate(temperature=0.0)
        await talk.generate(temperature=0.5)
        talk.append_ids([60])
        with pytest.raises(EngineUnavailable):
            await talk.generate(temperature=0.5)
        await talk.generate()

    answers = Answers("fails", "answers", "fails")
    talk, sample = conversation(answers)
    assert await talk.run(uses_what_answers) is SampleStatus.COMPLETED
    assert sample.metadata == {"num_turns": 2}
    assert [turn.temperature for turn in sample.turns] == [0.5, None]
    assert sample.buffer.ids.tolist() == [5, 60, 5]


async def test_a_mistake_with_a_conversation_is_named() -> None:
    async def misspells(talk: Conversation) -> None:
        talk.rewrad = 1.0  # pyright: ignore[reportAttributeAccessIssue] - a user's mistake

    async def asks_a_plain_function(talk: Conversation) -> None:
        await talk.generate_by(lambda ids: (ids, [0.0]))  # pyright: ignore[reportArgumentType] - a user's mistake

    for function, said in (
        (misspells, "a conversation has no 'rewrad' to set; allowed: reward, rewards"),
        (asks_a_plain_function, r"the service is not async and returned \(\[7, 8\], \[0.0\]\): write `async def`"),
    ):
        talk, _ = conversation(Answers())
        with pytest.raises(ValueError, match=said):
            await talk.run(function)


CUT = {"top_p": 0.9, "top_k": 50}
LISTED = CUT | {"return_sampling_mask": True}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "return_sampling_mask": False}


@pytest.mark.parametrize(
    ("recipe", "own", "sent", "trains"),
    [
        ({}, {"temperature": 0.5}, {"temperature": 0.5}, True),
        ({}, {"temperature": 0.0, "top_p": 0.5}, GREEDY, False),
        ({}, {"top_p": 0.5}, {"top_p": 0.5}, False),  # the engine's log-probs are those of all tokens
        ({}, {"top_k": 5}, {"top_k": 5}, False),
        (CUT, {"temperature": 0.5}, CUT | {"temperature": 0.5}, True),
        (CUT, {"top_p": 1.0, "top_k": -1}, {"top_p": 1.0, "top_k": -1}, True),
        (CUT, {"top_p": 1.0}, {"top_p": 1.0, "top_k": 50}, False),
        (LISTED, {"top_p": 0.5, "top_k": 5}, {"top_p": 0.5, "top_k": 5, "return_sampling_mask": True}, True),
        (LISTED, {"top_k": 51}, {"top_p": 0.9, "top_k": 51, "return_sampling_mask": False}, False),
        (LISTED, {"top_k": 1}, {"top_p": 0.9, "top_k": 1, "return_sampling_mask": False}, False),
        (LISTED, {"top_k": -1}, {"top_p": 0.9, "top_k": -1, "return_sampling_mask": False}, False),
    ],
)
async def test_a_turn_trains_if_its_log_probs_are_of_the_distribution_it_came_from(
    recipe: dict[str, Any], own: dict[str, Any], sent: dict[str, Any], trains: bool
) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate(**own)

    answers, params = Answers(), SamplingParams(max_new_tokens=9, **recipe)
    sample = OpenSample(index=0, prompt_len=2)
    talk = Conversation(task(0).prompt, sample, params=params, ask=answers, model=AnyTokens())
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert answers.params == [SamplingParams(max_new_tokens=9, **sent)]
    assert sample.untrained == (() if trains else ((0, 1),))


async def test_beside_log_probs_of_pools_a_turn_at_its_own_temperature_does_not_train() -> None:
    """Pools compute them at temperature 1."""

    async def function(talk: Conversation) -> None:
        await talk.generate(temperature=0.5)
        talk.append_ids([60])
        await talk.generate(temperature=1.0)

    sample = OpenSample(index=0, prompt_len=2)
    params = SamplingParams(max_new_tokens=9)
    talk = Conversation(
        task(0).prompt, sample, params=params, ask=Answers(), model=AnyTokens(), trains_temperatures=False
    )
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert sample.untrained == ((0, 1),)


@pytest.mark.parametrize(
    "own",
    [
        *({"temperature": -1.0}, {"temperature": True}, {"temperature": "1"}),
        *({"top_p": 0.0}, {"top_p": 1.5}, {"top_p": True}),
        *({"top_k": 0}, {"top_k": -2}, {"top_k": True}, {"top_k": 2.0}, {"max_new_tokens": True}),
    ],
)
async def test_impossible_sampling_is_refused(own: dict[str, Any]) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate(**own)

    talk, _ = conversation(Answers())
    with pytest.raises(ValueError, match=f"{next(iter(own))} = "):
        await talk.run(function)


async def test_numbers_of_numpy_become_those_that_messages_carry() -> None:
    async def function(talk: Conversation) -> None:
        numbers: dict[str, Any] = {"temperature": np.float64(0.5), "top_p": np.float32(0.5), "top_k": np.int64(5)}
        await talk.generate(**numbers, max_new_tokens=np.int64(1))  # pyright: ignore[reportArgumentType] - a user's
        talk.reward, talk.rewards["format"] = np.float32(0.5), np.int64(1)  # pyright: ignore[reportAttributeAccessIssue]

    answers = Answers()
    talk, sample = conversation(answers)
    assert await talk.run(function) is SampleStatus.COMPLETED
    (params,) = answers.params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.5, 5)
    assert type(sample.turns[0].temperature) is float
    assert sample.own_score is not None
    assert (sample.own_score.reward, sample.own_score.details) == (0.5, {"format": 1.0})
    assert type(sample.own_score.reward) is float


@pytest.mark.parametrize(("text", "reason"), [(["a"], "text(['a']): expected a str"), ("\udc80", "not text in UTF-8")])
async def test_a_response_that_no_message_carries_fails_the_group(text: Any, reason: str) -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate()
        talk.text = text

    talk, _ = conversation(Answers())
    with pytest.raises(ValueError, match=re.escape(reason)):
        await talk.run(function)


async def test_a_prompt_that_graders_cannot_read_is_refused_before_it_is_sent() -> None:
    async def function(talk: Conversation) -> None:
        await talk.generate()
        chat: Any = [{"role": "user", "content": "Who?"}]
        await talk.grade("a draft", chat)

    talk, _ = conversation(Answers())  # its grader raises "there is no grader here"
    with pytest.raises(ValueError, match=re.escape("grade: prompt([{'role': 'user'")):
        await talk.run(function)


async def test_waiting_for_a_grader_is_not_the_time_of_the_function() -> None:
    async def grade_late(text: str, prompt: str | None) -> float:
        assert talk.is_waiting
        await anyio.sleep(0.3)
        return 1.0

    async def function(talk: Conversation) -> None:
        await talk.generate()
        talk.reward = await talk.grade("a draft")
        assert not talk.is_waiting

    sample, params = OpenSample(index=0, prompt_len=2), SamplingParams(max_new_tokens=9)
    model = AnyTokens()
    talk = Conversation(
        task(0).prompt, sample, params=params, ask=Answers(), model=model, grade=grade_late, limit_s=0.1
    )
    assert await talk.run(function) is SampleStatus.COMPLETED
    assert sample.own_score is not None


async def test_a_function_does_not_see_that_the_bus_fails() -> None:
    """If it went on after its turn was not stored, an engine would add to a turn that is complete."""

    async def service(ids: list[int]) -> tuple[list[int], list[float]]:
        return [5], [-1.0]

    async def goes_on(talk: Conversation) -> None:
        with suppress(Exception):
            await talk.generate_by(service)
        with suppress(Exception):
            await talk.generate()

    async def keep(sample: OpenSample) -> None:
        raise BusError("no bus")

    sample, answers = OpenSample(index=0, prompt_len=2), Answers()
    params = SamplingParams(max_new_tokens=9)
    talk = Conversation(task(0).prompt, sample, params=params, ask=answers, model=AnyTokens(), keep=keep)
    with pytest.raises(BusError, match="no bus"):
        await talk.run(goes_on)
    assert answers.params == []


async def sets_rewards(talk: Conversation) -> None:
    talk.rewards["format"] = 1.0
    await talk.generate()
    talk.append_ids([60])
    await talk.generate()


async def sets_no_number(talk: Conversation) -> None:
    talk.reward = float("nan")
    await talk.generate()


async def sets_a_huge_reward(talk: Conversation) -> None:
    talk.reward = 1e308
    await talk.generate()


async def names_a_huge_reward(talk: Conversation) -> None:
    talk.reward, talk.rewards["format"] = 1.0, -1e16
    await talk.generate()


@pytest.mark.parametrize(
    ("function", "max_tokens", "reason"),
    [
        (sets_rewards, 9, "rewards without a reward: set both"),
        (sets_rewards, 2, "rewards without a reward: set both"),  # truncated before the function set it
        (sets_no_number, 9, "the reward 'reward' is nan, not a finite number"),
        (sets_a_huge_reward, 9, "the reward 'reward' is 1e+308, beyond the 1e+15 that a reward may be"),
        (names_a_huge_reward, 9, "the reward 'format' is -1e+16, beyond the 1e+15 that a reward may be"),
    ],
)
async def test_a_reward_that_is_none_fails_the_sample(function: Any, max_tokens: int, reason: str) -> None:
    talk, _ = conversation(Answers(), max_tokens=max_tokens)
    assert await talk.run(function) is SampleStatus.FAILED
    assert talk.reason == reason


async def test_a_halted_function_need_not_have_set_its_reward() -> None:
    async def is_halted(talk: Conversation) -> None:
        talk.rewards["format"] = 1.0
        await talk.generate()
        talk.halt()
        await anyio.sleep_forever()

    talk, _ = conversation(Answers())
    assert await talk.run(is_halted) is SampleStatus.ABORTED
