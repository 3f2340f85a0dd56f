"""The contract: what is sampled, with which log-probs, under which weights, and where it ends."""

from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from actors.rollout.sglang.answers import Answer, segment_of, status_of
from actors.rollout.sglang.facts import KEPT_OF_RESPONSE
from actors.rollout.sglang.streams import Stream
from actors.trainer.algorithms.log_probs import KeptTokens, log_probs_and_entropy
from messages import Int32Array, SampleKey, SampleStatus, Segment
from tests.sglang.model import CONTEXT, DOT, DOTTED, EOS, text_of
from tests.sglang.rig import Rig, request
from tests.support.tiny_models import all_logits, teacher_forced

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

PROMPT = [3, 4, 5]
CLOSE = 1e-4  # natural log, between the engine's cached float32 passes and a whole one
LONG = 300  # tokens: long enough to be streamed


def segment(answer: Answer) -> Segment:
    return segment_of(answer, SampleKey(group_id=0, attempt=0, index=0), Int32Array(PROMPT))


def check_log_probs(answer: Answer, model: Path, weights: Path, prompt: list[int] = PROMPT) -> None:
    """Compare with transformers' own forward pass."""
    packed = segment(answer)
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
    streams: list[Stream] = []
    whole = await rig.generate(request(PROMPT, 40))
    streamed = await rig.generate(request(PROMPT, LONG), streams)
    assert len(streams) == 1
    for generated, length in ((whole, 40), (streamed, LONG)):
        (answer,) = generated.answers
        assert not generated.cut_short
        assert status_of(answer) is SampleStatus.TRUNCATED
        assert len(answer.output_ids) == length
        packed = segment(answer)
        assert [(span.version, span.start, span.end) for span in packed.weight_spans] == [
            (1, 0, len(answer.output_ids))
        ]
        assert packed.text == text_of(answer.output_ids)
        check_log_probs(answer, contract_model, weights[1])


@pytest.mark.behaviour("a batch of prompts is answered in their order")
async def test_batch(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    prompts = [[7, 8], [9], [10, 11, 12]]
    one = request([0], 12)
    generated = await rig.generate(type(one)(**{**vars(one), "input_ids": prompts}))
    assert len(generated.answers) == 3
    for prompt, answer in zip(prompts, generated.answers, strict=True):
        check_log_probs(answer, contract_model, weights[1], prompt)


@pytest.mark.behaviour("a stop id ends the answer and is its last token")
async def test_stop_id(rig: Rig) -> None:
    stops = tuple(range(2, 28))
    for streams in (None, list[Stream]()):
        (answer,) = (await rig.generate(request(PROMPT, LONG, stop_token_ids=stops), streams)).answers
        assert status_of(answer) is SampleStatus.COMPLETED
        assert answer.output_ids[-1] in stops
        assert not set(answer.output_ids[:-1]) & {*stops}
        assert len(segment(answer).response_ids) == len(answer.output_ids)


@pytest.mark.behaviour("the model's end token ends the answer and is its last token")
async def test_end_token(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    await rig.update(3)
    for streams in (None, list[Stream]()):
        (answer,) = (await rig.generate(request(PROMPT, LONG), streams)).answers
        assert status_of(answer) is SampleStatus.COMPLETED
        assert answer.output_ids.index(EOS) == len(answer.output_ids) - 1
        assert [span.version for span in segment(answer).weight_spans] == [3]
        check_log_probs(answer, contract_model, weights[3])


@pytest.mark.behaviour("a stop text inside a token ends the answer: text is cut behind it, the token stays whole")
async def test_stop_text_inside_a_token(rig: Rig) -> None:
    for streams in (None, list[Stream]()):
        inside = 0
        for _ in range(6):
            (answer,) = (await rig.generate(request(PROMPT, LONG, stop=(".",)), streams)).answers
            assert status_of(answer) is SampleStatus.COMPLETED
            whole = text_of(answer.output_ids)
            assert answer.output_ids[-1] in (DOT, *DOTTED)
            assert answer.text == whole[: whole.find(".") + 1]
            inside += answer.output_ids[-1] in DOTTED
        assert inside


@pytest.mark.behaviour("a stop text that is an end token's counts as the stop text")
async def test_stop_text_of_an_end_token(rig: Rig) -> None:
    await rig.update(3)
    (answer,) = (await rig.generate(request(PROMPT, LONG, stop=("<eos>",)))).answers
    assert answer.meta_info.finish_reason == {"type": "stop", "matched": "<eos>"}
    assert answer.output_ids[-1] == EOS


@pytest.mark.behaviour("an answer that fills the context ends two tokens before it, truncated")
async def test_full_context(rig: Rig) -> None:
    (answer,) = (await rig.generate(request([3] * 450, CONTEXT - 450))).answers
    assert status_of(answer) is SampleStatus.TRUNCATED
    assert len(answer.output_ids) == CONTEXT - 450 - KEPT_OF_RESPONSE


@pytest.mark.behaviour("many requests at once, more than there are slots")
async def test_more_than_slots(rig: Rig) -> None:
    lengths: list[int] = []

    async def ask(index: int) -> None:
        (answer,) = (await rig.generate(request([index + 2], 24))).answers
        packed = segment(answer)
        lengths.append(len(packed.response_ids))
        assert status_of(answer) is SampleStatus.TRUNCATED

    async with anyio.create_task_group() as group:
        for index in range(20):
            group.start_soon(ask, index)
    assert len(lengths) == 20


@pytest.mark.behaviour("sampling masks hold the tokens that top-p and top-k kept, and log-probs are those among them")
async def test_log_probs_among_kept_tokens(rig: Rig, contract_model: Path, weights: dict[int, Path]) -> None:
    for length, streams in ((24, None), (LONG, list[Stream]())):
        params = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "return_sampling_mask": True}
        (answer,) = (await rig.generate(request(PROMPT, length, **params), streams)).answers
        packed = segment(answer)
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
