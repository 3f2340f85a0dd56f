"""What the served model allows, and where its answers end."""

import json
from pathlib import Path

import pytest

from actors.rollout.sglang.answers import Answer, MetaInfo, status_of
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.sglang.streams import Stream
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


def aborted(*ids: int, text: str = "") -> Answer:
    return Answer(meta_info=MetaInfo(finish_reason={"type": "abort"}), text=text, output_ids=list(ids))


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
        assert status_of(model.ended(aborted(A, end), [A, end], params)) is SampleStatus.COMPLETED
    ended = model.ended(aborted(A, B, text="ab"), [A, B], params)
    assert ended.meta_info.finish_reason == {"type": "stop", "matched": "b"}
    for open_ids in ([A], [SLASH, A], []):
        assert status_of(model.ended(aborted(*open_ids), open_ids, params)) is SampleStatus.ABORTED


def test_the_last_chunk_of_a_retracted_stream_repeats_what_came() -> None:
    def chunk(ids: list[int], total: int, text: str, finish: object) -> bytes:
        log_probs = [[-1.0, token, None] for token in ([A, B, A] if finish else ids)]
        meta = {"completion_tokens": total, "finish_reason": finish, "output_token_logprobs": log_probs}
        meta["weight_version"] = "1"
        return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()

    stream = Stream()
    stream.add(chunk([A], 1, "a", None))
    stream.add(chunk([B, A], 3, "ba", None))
    stream.add(chunk([A], 3, "aba", {"type": "abort", "message": "Abort in waiting queue"}))
    rest = stream.rest()
    assert stream.ended
    assert (rest.output_ids, rest.text) == ([A, B, A], "aba")
    assert [token for _, token, _ in rest.meta_info.output_token_logprobs] == [A, B, A]
