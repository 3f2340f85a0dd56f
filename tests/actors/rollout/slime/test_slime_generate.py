"""Generate functions with slime's imports and signature: what they post are turns, and what they return is compared."""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import anyio
import numpy as np
import pytest

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.sample import OpenSample
from actors.rollout.sglang.errors import EngineUnavailable
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleKey, SampleStatus, SamplingParams
from runtime.compat.slime.functions import PAGE
from runtime.functions.load import PluginError, load
from runtime.functions.table import GENERATE
from tests.build.topology import topology_with
from tests.support.checks import function_problems

pytestmark = pytest.mark.anyio
PROMPT = "Who?"
FUNCTIONS = """
import asyncio
from copy import deepcopy

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample


def url_of(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


async def searches(args, sample: Sample, sampling_params) -> Sample:  # as search-r1: texts, own lists
    assert not args.partial_rollout
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, log_probs = "", [], [], []
    for _ in range(3):
        params = {**sampling_params, "stop": [*(sampling_params["stop"] or []), "</search>"]}
        payload = {"text": sample.prompt + response, "sampling_params": params, "return_logprob": True}
        output = await post(url_of(args), payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        ids += [item[1] for item in pairs]
        log_probs += [item[0] for item in pairs]
        mask += [1] * len(pairs)
        if output["meta_info"]["finish_reason"]["type"] == "length" or "</search>" not in output["text"]:
            break
        found = "<information>Ada</information>"
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response, ids, mask, log_probs = (
            response + found, ids + found_ids, mask + [0] * len(found_ids), log_probs + [0.0] * len(found_ids)
        )
    sample.tokens, sample.response_length, sample.response = prompt_ids + ids, len(ids), response
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    ends = {"length": Sample.Status.TRUNCATED, "stop": Sample.Status.COMPLETED}
    sample.status = ends[output["meta_info"]["finish_reason"]["type"]]
    return sample


async def uses_tools(args, sample, sampling_params, evaluation=False):  # as retool: tokens, a prompt of its own
    state = GenerateState(args)
    prompt_ids = state.tokenizer("<tools>" + sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response = list(prompt_ids), ""
    for _ in range(2):
        room = args.rollout_max_context_len - len(sample.tokens)
        params = dict(sampling_params, max_new_tokens=min(sampling_params["max_new_tokens"], room))
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        output = await post(url_of(args), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[item[1] for item in pairs], log_probs=[item[0] for item in pairs],
            meta_info=output["meta_info"], text=output["text"],
        )
        result = "<result>4</result>"
        sample.append_response_tokens(
            args, tokens=state.tokenizer.encode(result, add_special_tokens=False), trainable=False, text=result
        )
    sample.tool_call_count, sample.reward, sample.state = 2, 0.5, object()
    sample.metadata["evaluation"] = evaluation
    return sample


async def agents(args, sample, sampling_params):  # as multi_agent: several samples of one rollout
    args = deepcopy(args)
    args.sampling_params = sampling_params
    return await load_function("slime.utils.misc.load_function")(__name__ + ".solve")(args, sample)


async def solve(args, given):
    async def one(prompt):
        state, sample = GenerateState(args), deepcopy(given)
        sample.tokens = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        payload = {"input_ids": sample.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
        output = await post(url_of(args), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[item[1] for item in pairs], log_probs=[item[0] for item in pairs],
            meta_info=output["meta_info"], text=output["text"],
        )
        sample.reward = float(len(prompt))
        return sample

    samples = await asyncio.gather(one("plan"), one("plan"), one("check it"))
    return [samples[2], samples[0]]  # one of them is left out


async def grades(args, sample, sampling_params):
    from slime.rollout.rm_hub import batched_async_rm

    sample = await one_turn(args, sample, sampling_params)
    sample.response = "ab"
    sample.reward = sum(await batched_async_rm(args, [sample, sample]))
    return sample


async def one_turn(args, sample, sampling_params, *, cut=0, mask=None, more=0, **fields):
    state = GenerateState(args)
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(url_of(args), {"text": sample.prompt, "sampling_params": sampling_params})
    ids = output["output_ids"][: len(output["output_ids"]) - cut] + [1] * more
    sample.tokens, sample.response_length, sample.loss_mask = sample.tokens + ids, len(ids), mask
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def with_changes(**changes):
    async def function(args, sample, sampling_params):
        return await one_turn(args, sample, sampling_params, **changes)
    return function


cuts = with_changes(cut=2)
masks = with_changes(mask=[1, 0, 0, 1])
removes = with_changes(remove_sample=True)
fails = with_changes(status=Sample.Status.FAILED)
aborts = with_changes(status=Sample.Status.ABORTED)
aborts_by_text = with_changes(status="aborted")  # as tau-bench
has_no_such_status = with_changes(status="done")
other_tokens = with_changes(tokens=[87, 104, 111, 63, 1, 1, 1, 1])
trains_input = with_changes(more=1, mask=[1] * 5)
short_mask = with_changes(mask=[1])
wrong_length = with_changes(response_length=3)
says_no_text = with_changes(response=["a"])
teaches = with_changes(teacher_log_probs=[0.0])


async def tries_again(args, sample, sampling_params):
    payload = {"text": sample.prompt, "sampling_params": sampling_params}
    answers = []
    for _ in range(2):
        for _ in range(3):
            try:
                answers.append(await post(url_of(args), payload))
                break
            except Exception:
                pass
        payload = payload | {"text": sample.prompt + answers[0]["text"] + " go on"}
    state = GenerateState(args)
    response = payload["text"].removeprefix(sample.prompt) + answers[1]["text"]
    ids = state.tokenizer(response, add_special_tokens=False)["input_ids"]
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.response, sample.response_length = prompt_ids + ids, response, len(ids)
    return sample


async def grades_a_chat(args, sample, sampling_params):
    from slime.rollout.rm_hub import async_rm

    sample = await one_turn(args, sample, sampling_params, prompt=[{"role": "user", "content": "Who?"}])
    await async_rm(args, sample)


async def returns_nothing(args, sample, sampling_params):
    await one_turn(args, sample, sampling_params)


async def reads_more(args, sample, sampling_params):
    return args.num_layers


async def wants_images(args, sample, sampling_params):
    await post(url_of(args), {"text": sample.prompt, "image_data": ["x"], "sampling_params": sampling_params})


async def other_min_p(args, sample, sampling_params):
    await post(url_of(args), {"text": sample.prompt, "sampling_params": {**sampling_params, "min_p": 0.5}})


async def stops_at_an_empty_text(args, sample, sampling_params):
    await post(url_of(args), {"text": sample.prompt, "sampling_params": {**sampling_params, "stop": ["a", ""]}})


async def stops_at_nothing(args, sample, sampling_params):
    await post(url_of(args), {"text": sample.prompt, "sampling_params": {**sampling_params, "stop": ""}})


async def other_endpoint(args, sample, sampling_params):
    await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers", {})


async def takes_two(args, sample):
    return sample


def plain(args, sample, sampling_params):
    return sample
"""


class Letters(ServedModel):
    """Tokens are letters, by their code."""

    def __init__(self) -> None:
        super().__init__(Path("/model"), 1000, frozenset({0}))

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def end_in(self, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", params: SamplingParams) -> int | str | None:
        return next((stop for stop in params.stop if self.decode(ids.tolist()).endswith(stop)), None)


class Engine:
    """Answers with texts, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.model = Letters()

    async def __call__(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        buffer, prompt = sample.buffer, sample.prompt_of(Int32Array(self.model.encode(PROMPT)))
        self.asked.append((self.model.decode([*prompt, *buffer.ids, *sample.pending]), params.stop))
        text = self.answers.pop(0)
        if text == "fails":
            raise EngineUnavailable("no engine")
        text = text[:limit]
        ids = self.model.encode(text)
        buffer.append_input(sample.pending)
        buffer.append(np.array(ids), np.full(len(ids), -0.5), text, "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0, part=sample.part), prompt)
        sample.turn_status = SampleStatus.COMPLETED
        sample.end_turn()
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slimes.py").write_text(FUNCTIONS)
    return tmp_path


async def run(
    folder: Path, name: str, engine: Engine, sample: OpenSample | None = None, *, max_tokens: int = 200
) -> tuple[Conversation, OpenSample, SampleStatus]:
    ids = Int32Array(engine.model.encode(PROMPT))
    prompt = Prompt(data="d", row=0, text=PROMPT, prompt_ids=ids, label="Ada", metadata={"a": 1})
    sample = sample or OpenSample(index=3, prompt_len=len(ids))
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.7)

    async def grade(text: str, of_prompt: str | None) -> float:
        return float(len(text + (of_prompt or "")))

    talk = Conversation(prompt, sample, params=sampling, ask=engine, model=engine.model, grade=grade)
    function = load(GENERATE, "rollout.custom_generate", f"slime:slimes.py:{name}", [folder]).function
    with anyio.fail_after(10):
        status = await talk.run(function)
    return talk, sample, status


def untrained(sample: OpenSample) -> list[tuple[int, int]]:
    return list(sample.untrained)


async def test_what_a_function_posts_as_text_is_continued_with_the_tokens_of_the_engine(folder: Path) -> None:
    engine = Engine("<search>who</search>", "It is Ada.")
    talk, sample, status = await run(folder, "searches", engine)
    found, first = "<information>Ada</information>", "<search>who</search>"
    assert engine.asked == [(PROMPT, ("</search>",)), (PROMPT + first + found, ("</search>",))]
    assert (status, talk.text) == (SampleStatus.COMPLETED, first + found + "It is Ada.")
    assert engine.model.decode(sample.buffer.ids.tolist()) == talk.text
    assert (len(sample.turns), untrained(sample), sample.own_score) == (2, [], None)
    assert sample.metadata == {"num_turns": 2}


async def test_an_answer_that_was_cut_off_and_a_full_context_end_it_as_truncated(folder: Path) -> None:
    engine = Engine("<search>who</search>")
    assert (await run(folder, "searches", engine, max_tokens=10))[2] is SampleStatus.TRUNCATED
    engine = Engine("<search>who</search>")
    talk, sample, status = await run(folder, "searches", engine, max_tokens=30)  # no room for what was found
    assert (status, len(engine.asked)) == (SampleStatus.TRUNCATED, 1)
    assert talk.text.endswith("</information>")  # graders see what the function returned
    assert sample.buffer.num_tokens == len("<search>who</search>")


async def test_a_function_may_begin_with_a_prompt_of_its_own_and_note_what_its_grader_reads(folder: Path) -> None:
    engine = Engine("2+2", "4!")
    talk, sample, status = await run(folder, "uses_tools", engine)
    assert [text for text, _ in engine.asked] == ["<tools>Who?", "<tools>Who?2+2<result>4</result>"]
    assert (status, sample.prompt_len) == (SampleStatus.COMPLETED, len("<tools>Who?"))
    assert talk.text == "2+2<result>4</result>4!<result>4</result>"
    assert engine.model.decode(sample.buffer.ids.tolist()) == "2+2<result>4</result>4!"  # the rest is of no turn
    assert sample.metadata == {"tool_call_count": 2, "metadata": {"a": 1, "evaluation": False}, "num_turns": 2}
    assert sample.own_score is not None
    assert sample.own_score.reward == 0.5


async def test_a_replay_returns_the_turns_and_continues_the_prompt_of_the_function(folder: Path) -> None:
    _, sample, _ = await run(folder, "uses_tools", Engine("2+2", "4!"))
    sample.status = SampleStatus.ABORTED
    talk, _, status = await run(folder, "uses_tools", Engine(), sample)
    assert (status, talk.mismatch, talk.text) == (
        SampleStatus.COMPLETED, None, "2+2<result>4</result>4!<result>4</result>"
    )  # fmt: skip
    talk, _, status = await run(folder, "searches", Engine(), sample)
    assert (status, talk.starts_again) == (SampleStatus.ABORTED, True)
    assert "prompt of conversation 0" in (talk.mismatch or "")


async def test_several_samples_are_parts_and_a_conversation_in_none_of_them_does_not_train(folder: Path) -> None:
    engine = Engine("one", "two!", "three")
    _, sample, status = await run(folder, "agents", engine)
    assert [text for text, _ in engine.asked] == ["plan", "plan", "check it"]
    assert status is SampleStatus.COMPLETED
    parts = sample.parts
    assert [engine.model.decode(part.buffer.ids.tolist()) for part in parts] == ["one", "two!", "three"]
    assert [untrained(part) for part in parts] == [[], [(0, 4)], []]
    assert [part.own_score and part.own_score.reward for part in parts] == [4.0, None, 8.0]


async def test_a_function_may_ask_the_grader_of_its_row(folder: Path) -> None:
    _, sample, _ = await run(folder, "grades", Engine("abcd"))
    assert sample.own_score is not None
    assert sample.own_score.reward == 2 * len("ab" + PROMPT)


async def test_a_request_that_failed_may_be_posted_again(folder: Path) -> None:
    """What it added is taken back: posted again, it is the next turn of the same conversation."""
    engine = Engine("fails", "one", "fails", "two")
    talk, sample, status = await run(folder, "tries_again", engine)
    assert [text for text, _ in engine.asked] == [PROMPT, PROMPT, PROMPT + "one go on", PROMPT + "one go on"]
    assert (status, talk.text, talk.reason) == (SampleStatus.COMPLETED, "one go ontwo", "")
    assert (len(sample.parts), len(sample.turns), untrained(sample)) == (1, 2, [])


async def test_a_grader_is_not_asked_with_a_chat_as_prompt(folder: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("grade: prompt([{'role'")):
        await run(folder, "grades_a_chat", Engine("abcd"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuts", [(2, 4)]),  # tokens that the function left out
        ("masks", [(1, 3)]),
        ("removes", [(0, 4)]),
    ],
)
async def test_masks_exclude_tokens_from_the_loss(folder: Path, name: str, expected: list[tuple[int, int]]) -> None:
    _, sample, status = await run(folder, name, Engine("abcd"))
    assert (status, untrained(sample)) == (SampleStatus.COMPLETED, expected)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("fails", SampleStatus.FAILED, "returned it as failed"),
        ("aborts", SampleStatus.ABORTED, "returned it as aborted"),
        ("aborts_by_text", SampleStatus.ABORTED, "returned it as aborted"),
        ("has_no_such_status", SampleStatus.FAILED, "'done' is not a valid"),
        (
            "other_tokens",
            SampleStatus.FAILED,
            "sample.tokens must be the tokens of the prompt and those that the engines gave",
        ),
        ("trains_input", SampleStatus.FAILED, "loss_mask[4] is 1, and no engine generated that token"),
        ("short_mask", SampleStatus.FAILED, "loss_mask has 1 values, response_length = 4"),
        ("wrong_length", SampleStatus.FAILED, "response_length = 3, with 8 tokens, of which 4 are the prompt"),
        ("says_no_text", SampleStatus.FAILED, "sample.response(['a']): expected a str"),
        ("teaches", SampleStatus.FAILED, "sample.teacher_log_probs is not taken"),
        ("returns_nothing", SampleStatus.FAILED, "None is not a Sample"),
    ],
)
async def test_a_sample_that_is_not_what_engines_gave_fails_alone(
    folder: Path, name: str, status: SampleStatus, reason: str
) -> None:
    talk, _, found = await run(folder, name, Engine("abcd"))
    assert found is status
    assert reason in talk.reason


@pytest.mark.parametrize("name", ["stops_at_an_empty_text", "stops_at_nothing"])
async def test_an_empty_stop_text_is_refused(folder: Path, name: str) -> None:
    engine = Engine("abcd")
    with pytest.raises(ValueError, match="stop text '': an empty one ends each response at its first token"):
        await run(folder, name, engine)
    assert not engine.asked


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reads_more", "args.num_layers is not provided"),
        ("wants_images", "image_data is not provided"),
        ("other_min_p", "min_p = 0.5 is not the run's"),
        ("other_endpoint", "only to /generate"),
    ],
)
async def test_what_is_not_provided_is_an_error_that_names_the_page(folder: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        await run(folder, name, Engine("abcd"))
    assert PAGE in str(caught.value)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("slime:slimes.py:takes_two", "is called with (args, sample, sampling_params)"),
        ("slime:slimes.py:plain", "write `async def`"),
        ("slime:slimes.py:nothing", "there is no 'nothing' in it"),
        ("slime:nowhere.py:nothing", "no such file"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, refusal: str
) -> None:
    monkeypatch.chdir(folder)
    (problem,) = function_problems(topology_with(rollout={"custom_generate": name}))
    assert problem.key == "rollout.custom_generate"
    assert refusal in problem.message


def test_an_installed_slime_is_not_replaced_by_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.compat.slime.functions.offer", lambda: True)
    with pytest.raises(PluginError, match="slime is installed"):
        load(GENERATE, "rollout.custom_generate", "slime:slimes.py:searches", [folder])


def test_a_function_stays_what_it_was_named(folder: Path) -> None:
    function = load(GENERATE, "rollout.custom_generate", "slime:slimes.py:searches", [folder]).function
    assert inspect.iscoroutinefunction(function)
    assert getattr(function, "__name__", "") == "searches"
