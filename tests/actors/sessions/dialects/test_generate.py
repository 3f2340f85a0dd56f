"""Prompts that verifiers renders itself come as tokens, and their answers have a log-prob for each token."""

import json
from typing import Any

import pytest

from actors.sessions.dialects.generate import LOWEST_LOG_PROB, GenerateDialect, models
from actors.sessions.dialects.reading import Asked, ParameterRefused, Turn
from runtime.sessions.turns import TurnRequest, TurnSampling
from tests.build.turns import answer

GENERATE = GenerateDialect()


def read(sampling: dict[str, Any] | None = None, **fields: Any) -> Asked:
    body = {"model": "m", "token_ids": [3, 4]} | fields
    return GENERATE.read(json.dumps(body if sampling is None else body | {"sampling_params": sampling}).encode())


def test_a_request_of_verifiers_is_read() -> None:
    sampling = {
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    given = TurnSampling(temperature=1.0, max_tokens=8, stop_token_ids=(2,))
    assert read(sampling) == Asked(TurnRequest((), sampling=given, model="m", prompt_ids=(3, 4)))
    assert read().request.sampling == TurnSampling()


def test_an_answer_has_a_finite_log_prob_for_each_token() -> None:
    response = json.loads(GENERATE.answer(read(), Turn("t", 7, (answer("x", finish="length"),))))
    assert response["request_id"] == "t"
    assert response["choices"] == [
        {
            "index": 0,
            "logprobs": {
                "content": [
                    {"token": "token_id:5", "logprob": -0.5},
                    {"token": "token_id:6", "logprob": -0.25},
                    {"token": "token_id:2", "logprob": LOWEST_LOG_PROB},
                ]
            },
            "finish_reason": "length",
            "token_ids": [5, 6, 2],
        }
    ]


@pytest.mark.parametrize(
    ("sampling", "fields", "param"),
    [
        ({"n": 2}, {}, "n"),
        ({"min_tokens": 2}, {}, "min_tokens"),
        ({"ignore_eos": True}, {}, "ignore_eos"),
        ({"logit_bias": {"1": 2}}, {}, "logit_bias"),
        ({}, {"token_ids": []}, "token_ids"),
        ({}, {"token_ids": [-1]}, "token_ids[0]"),
        ({}, {"features": {"mm": []}}, "features"),
        ({}, {"stream": True}, "stream"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    sampling: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ParameterRefused) as refused:
        read(sampling, **fields)
    assert refused.value.param == param


def test_the_list_of_models_has_the_room_of_the_context() -> None:
    listed = json.loads(models("m", 64))
    assert [(one["id"], one["max_model_len"], one["type"]) for one in listed["data"]] == [("m", 64, "model")]
