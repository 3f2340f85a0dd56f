"""The contract: what is sampled, with which log-probs, under which weights, and where it ends."""

import uuid
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import pytest
import torch

from actors.rollout.sglang.facts import KEPT_OF_RESPONSE
from actors.trainer.algorithms.log_probs import KeptTokens, log_probs_and_entropy
from messages import SampleStatus, SamplingParams
from tests.sglang.model import CONTEXT, DOT, DOTTED, EOS, text_of
from tests.sglang.rig import Rig, request
from tests.support.sampled import Sampled, request_of
from tests.support.tiny_models import all_logits, teacher_forced

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
CLOSE = 1e-4  # natural log, between the engine's cached float32 passes and a whole one
LONG = 300  # tokens: long enough to be streamed


def check_log_probs(answer: Sampled, model: Path, weights: Path, prompt: list[int] = PROMPT) -> None:
    """Compare with transformers' own forward pass."""
    packed = answer.segment
    expected = teacher_forced(with_weights(model, weights), prompt, answer.output_ids).numpy()
    assert np.abs(np.asarray(packed.rollout_log_probs) - expected).max() < CLOSE


def with_weights(model: Path, weights: Path) -> Path:
    """A directory that transformers can load: config of the one, weights of the other."""
    config = weights / "config.json"
    if not config.exists():
        config.write_bytes((model / "config.json").read_bytes())
    return weights


@pytest.mark.behaviour("ids, log-probs and spans of an answer, whole and streamed")
async def test_ids_log_probs_and_spans(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    whole = await rig.generate(request(PROMPT, 40))
    streamed = await rig.generate(request(PROMPT, LONG, streamed=True))
    for generated, length in ((whole, 40), (streamed, LONG)):
        (answer,) = generated.answers
        assert not generated.cut_short
        assert answer.status is SampleStatus.TRUNCATED
        assert len(answer.output_ids) == length
        packed = answer.segment
        assert [(span.version, span.start, span.end) for span in packed.weight_spans] == [
            (1, 0, len(answer.output_ids))
        ]
        assert packed.text == text_of(answer.output_ids)
        check_log_probs(answer, contract_model, weights[1])


@pytest.mark.behaviour("a batch of prompts is answered in their order")
async def test_batch(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    prompts = [[7, 8], [9], [10, 11, 12]]
    params = SamplingParams(max_new_tokens=12)
    generated = await rig.generate(request_of(uuid.uuid4().hex, prompts, params, seeds=[1, 2, 3]))
    assert len(generated.answers) == 3
    for prompt, answer in zip(prompts, generated.answers, strict=True):
        check_log_probs(answer, contract_model, weights[1], prompt)


@pytest.mark.behaviour("a stop id ends the answer and is its last token")
async def test_stop_id(rig: Rig) -> None:
    stops = tuple(range(2, 28))
    for streamed in (False, True):
        (answer,) = (await rig.generate(request(PROMPT, LONG, stop_token_ids=stops, streamed=streamed))).answers
        assert answer.status is SampleStatus.COMPLETED
        assert answer.output_ids[-1] in stops
        assert not set(answer.output_ids[:-1]) & {*stops}
        assert len(answer.segment.response_ids) == len(answer.output_ids)


@pytest.mark.behaviour("the model's end token ends the answer and is its last token")
async def test_end_token(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    await rig.update(3)
    for streamed in (False, True):
        (answer,) = (await rig.generate(request(PROMPT, LONG, streamed=streamed))).answers
        assert answer.status is SampleStatus.COMPLETED
        assert answer.output_ids.index(EOS) == len(answer.output_ids) - 1
        assert [span.version for span in answer.segment.weight_spans] == [3]
        check_log_probs(answer, contract_model, weights[3])


@pytest.mark.behaviour("a stop text inside a token ends the answer: text is cut behind it, the token stays whole")
async def test_stop_text_inside_a_token(rig: Rig) -> None:
    for streamed in (False, True):
        inside = 0
        for _ in range(6):
            (answer,) = (await rig.generate(request(PROMPT, LONG, stop=(".",), streamed=streamed))).answers
            assert answer.status is SampleStatus.COMPLETED
            whole = text_of(answer.output_ids)
            assert answer.output_ids[-1] in (DOT, *DOTTED)
            assert answer.text == whole[: whole.find(".") + 1]
            inside += answer.output_ids[-1] in DOTTED
        assert inside


@pytest.mark.behaviour("an empty stop text ends the answer at its first token, without a text")
async def test_empty_stop_text(rig: Rig) -> None:
    for stop in ([""], "", ["zzzz", ""]):
        answer = await _posted(rig, {"stop": stop, "max_new_tokens": 16})
        assert (len(answer["output_ids"]), answer["text"]) == (1, "")
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}


@pytest.mark.behaviour("min_new_tokens holds back stop ids, and not stop texts")
async def test_stop_before_the_least_number_of_tokens(rig: Rig) -> None:
    free = await _posted(rig, {"max_new_tokens": 16})
    least = {"max_new_tokens": 16, "min_new_tokens": 16}
    third = free["output_ids"][2]
    length = free["output_ids"].index(third) + 1
    by_text = await _posted(rig, {**least, "stop": [text_of([third])]})
    assert len(by_text["output_ids"]) <= length
    assert by_text["meta_info"]["finish_reason"]["type"] == "stop"
    by_id = await _posted(rig, {**least, "stop_token_ids": [third], "ignore_eos": False})
    assert len(by_id["output_ids"]) == 16
    assert third not in by_id["output_ids"][:15]


async def _posted(rig: Rig, params: dict[str, Any]) -> dict[str, Any]:
    """Return the server's own answer: the rollout actor sends no such request."""
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.0, "ignore_eos": True, **params}}
    async with aiohttp.ClientSession() as session, session.post(f"{rig.server.url}/generate", json=body) as response:
        assert response.status == 200
        return await response.json()


@pytest.mark.behaviour("a stop text that is an end token's counts as the stop text")
async def test_stop_text_of_an_end_token(rig: Rig) -> None:
    await rig.update(3)
    (answer,) = (await rig.generate(request(PROMPT, LONG, stop=("<eos>",)))).answers
    assert answer.finish_reason == {"type": "stop", "matched": "<eos>"}
    assert answer.output_ids[-1] == EOS


@pytest.mark.behaviour("an answer that fills the context ends two tokens before it, truncated")
async def test_full_context(rig: Rig) -> None:
    (answer,) = (await rig.generate(request([3] * 450, CONTEXT - 450))).answers
    assert answer.status is SampleStatus.TRUNCATED
    assert len(answer.output_ids) == CONTEXT - 450 - KEPT_OF_RESPONSE


@pytest.mark.behaviour("many requests at once, more than there are slots")
async def test_more_than_slots(rig: Rig) -> None:
    lengths: list[int] = []

    async def ask(index: int) -> None:
        (answer,) = (await rig.generate(request([index + 2], 24))).answers
        packed = answer.segment
        lengths.append(len(packed.response_ids))
        assert answer.status is SampleStatus.TRUNCATED

    async with anyio.create_task_group() as group:
        for index in range(20):
            group.start_soon(ask, index)
    assert len(lengths) == 20


@pytest.mark.behaviour("sampling masks hold the tokens that top-p and top-k kept, and log-probs are those among them")
async def test_log_probs_among_kept_tokens(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    for length, streamed in ((24, False), (LONG, True)):
        params: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "return_sampling_mask": True}
        (answer,) = (await rig.generate(request(PROMPT, length, **params, streamed=streamed))).answers
        packed = answer.segment
        assert packed.kept_counts is not None
        assert packed.kept_ids is not None
        counts = torch.from_numpy(np.array(packed.kept_counts, dtype=np.int64))
        kept = KeptTokens(torch.from_numpy(np.array(packed.kept_ids, dtype=np.int64)), counts)
        assert 1 <= counts.min() <= counts.max() <= 12
        directory = with_weights(contract_model, weights[1])
        logits = all_logits(directory, PROMPT, answer.output_ids)
        ids = torch.tensor(answer.output_ids)
        # the trainer's own function, with the logits as hidden states of an identity
        found, _ = log_probs_and_entropy(logits, torch.eye(logits.size(1)), ids, temperature=0.7, kept=kept)
        assert (found - torch.from_numpy(np.array(packed.rollout_log_probs))).abs().max() < CLOSE
        whole = teacher_forced(directory, PROMPT, answer.output_ids, temperature=0.7)
        assert (found > whole).any(), "the kept tokens are fewer than the vocabulary"
