"""What the served model allows, and where its answers end."""

import json
from pathlib import Path

import numpy as np
import pytest

from actors.rollout.samples.buffer import SampleBuffer
from actors.rollout.sglang.reading import AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from messages import SampleStatus, SamplingParams
from tests.support.tiny_models import EOS, write_tokenizer

A, B, SLASH = 2, 3, 60


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 10}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    write_tokenizer(tmp_path)
    return tmp_path


def test_end_tokens_are_those_of_both_configs_and_of_the_tokenizer(directory: Path) -> None:
    assert ServedModel.read(directory).end_ids == {EOS, 10, 11, 12}


def test_a_token_that_the_model_has_not_is_refused(directory: Path) -> None:
    model = ServedModel.read(directory)
    model.check_ids([0, 63])
    for bad in (64, -1):
        with pytest.raises(ValueError, match=f"{bad} is not a token of the model, whose vocabulary has 64"):
            model.check_ids([3, bad, 4])


def test_an_aborted_answer_that_reached_its_end_has_ended(directory: Path) -> None:
    model, params = ServedModel.read(directory), SamplingParams(max_new_tokens=9, stop=("b",), stop_token_ids=(SLASH,))
    for end in (EOS, 12, SLASH):
        assert model.end_in(np.array([A, end]), params) == end
    assert model.end_in(np.array([A, B]), params) == "b"
    for open_ids in ([A], [SLASH, A], []):
        assert model.end_in(np.array(open_ids, np.int32), params) is None


def test_the_last_chunk_of_a_retracted_stream_repeats_what_came() -> None:
    def chunk(ids: list[int], total: int, text: str, finish: object) -> bytes:
        log_probs = [[-1.0, token, None] for token in ([A, B, A] if finish else ids)]
        meta = {"completion_tokens": total, "finish_reason": finish, "output_token_logprobs": log_probs}
        meta["weight_version"] = "1"
        return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()

    buffer = SampleBuffer()
    reader = AnswerReader(buffer)
    reader.add_chunk(chunk([A], 1, "a", None))
    reader.add_chunk(chunk([B, A], 3, "ba", None))
    reader.add_chunk(chunk([A], 3, "aba", {"type": "abort", "message": "Abort in waiting queue"}))
    assert reader.ended
    assert reader.status is SampleStatus.ABORTED
    assert (buffer.ids.tolist(), buffer.text) == ([A, B, A], "aba")
    reader.end_at("b")
    assert (reader.status, buffer.text) == (SampleStatus.COMPLETED, "ab")
