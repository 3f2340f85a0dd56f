"""Whatever bytes come, decode answers with a message that can be sent again, or with DecodeError."""

from random import SystemRandom
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import BatchTrained, DecodeError, EncodeError, EvalEnded, GroupCompleted, decode, encode, message_types
from messages.codec import CONTENT_TYPE_HEADER, JSON, MSGPACK, TYPE_HEADER
from messages.ledger import not_finite_in
from tests.messages.mutations import Case, real_cases, search, wrong_with

HEADERS = {TYPE_HEADER: "group_completed", CONTENT_TYPE_HEADER: JSON}
COLUMN = {TYPE_HEADER: "column_published", CONTENT_TYPE_HEADER: JSON}


def completed(metadata: dict[str, Any]) -> GroupCompleted:
    return GroupCompleted(group_id=1, attempt=1, lease="", round=0, instance="", data="", samples=(), metadata=metadata)


def with_metadata(value: bytes) -> bytes:
    return encode(completed({"a": "here"})).payload.replace(b'"here"', value)


def column(values: bytes) -> bytes:
    return (
        b'{"type":"column_published","sample":{"group_id":1,"attempt":1,"index":0},"column":"a","values":%s}' % values
    )


@pytest.mark.parametrize(
    ("payload", "headers", "reason"),
    [
        (with_metadata(b"[" * 3000 + b"]" * 3000), HEADERS, "recursion"),
        (with_metadata(b"[" * 200 + b"]" * 200), HEADERS, "over 128 deep"),
        (with_metadata(b'{"a":' * 3000), HEADERS, "recursion"),
        (with_metadata(b"9" * 25), HEADERS, "integer is out of range"),
        (with_metadata(b"-" + b"9" * 19), HEADERS, "integer is out of range"),
        (with_metadata(b"[0.0012345678901234567," + b"9" * 20 + b"]"), HEADERS, "integer is out of range"),
        (encode(completed({})).payload.replace(b'"round":0', b'"round":' + b"9" * 25), HEADERS, "out of range"),
        (column(b"[%s]" % (b"9" * 400)), COLUMN, "at most 64 bits"),
        (column(b'["1"]'), COLUMN, "takes numbers"),
        (column(b"[null]"), COLUMN, "takes numbers"),
        (b"\xff\xfe", HEADERS, "malformed"),
        (b'{"type":"group_completed","data":"\xff"}', HEADERS, "utf-8"),
        (b"", {TYPE_HEADER: "x" * 10_000}, "unknown message type 'x{300}'$"),
        (b"", HEADERS | {CONTENT_TYPE_HEADER: "y" * 10_000}, "unknown content type 'y{300}'$"),
    ],
)
def test_what_once_passed_as_another_error_is_a_decode_error(
    payload: bytes, headers: dict[str, str], reason: str
) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode(payload, headers)


def test_a_float_too_large_for_its_array_is_infinite_and_no_warning() -> None:
    assert wrong_with(Case(column(b"[1e308]"), COLUMN)) == ""


def test_every_message_type_is_among_those_that_are_mutated() -> None:
    assert {case.headers[TYPE_HEADER] for case in real_cases()} == set(message_types())
    for case in real_cases():
        decode(case.payload, case.headers)


def test_mutated_messages_are_decoded_or_refused() -> None:
    seed = SystemRandom().getrandbits(32)
    assert search(20_000, seed) == [], f"seed {seed}"


@pytest.mark.nightly
def test_a_million_mutated_messages_are_decoded_or_refused() -> None:
    seed = SystemRandom().getrandbits(32)
    assert search(1_000_000, seed) == [], f"seed {seed}"


TAGS = st.sampled_from(sorted(message_types()))
KINDS = st.sampled_from([JSON, MSGPACK])


@given(st.binary(max_size=200), TAGS, KINDS)
def test_any_bytes_are_decoded_or_refused(payload: bytes, tag: str, kind: str) -> None:
    assert wrong_with(Case(payload, {TYPE_HEADER: tag, CONTENT_TYPE_HEADER: kind})) == ""


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_headers_are_refused(tag: str, kind: str) -> None:
    assert wrong_with(Case(b"{}", {TYPE_HEADER: tag, CONTENT_TYPE_HEADER: kind})) == ""


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner) | st.tuples(inner),
    max_leaves=30,
)


@given(VALUES, KINDS)
def test_what_a_user_noted_is_read_again_or_not_sent(value: Any, kind: str) -> None:
    try:
        encoded = encode(completed({"a": value}), content_type=kind)
    except EncodeError:
        return
    decode(*encoded)


@pytest.mark.parametrize("noted", [2**64, "\ud800", object(), [[[]]] * 2, {None: 1}])
def test_what_no_reader_could_use_is_an_encode_error(noted: Any) -> None:
    deep: Any = noted
    for _ in range(200 if isinstance(noted, list) else 0):
        deep = [deep]
    with pytest.raises(EncodeError, match="group_completed: "):
        encode(completed({"a": deep}))


def test_a_metric_that_json_cannot_say_is_named_instead() -> None:
    metrics = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/lr": 0.5}
    trained = BatchTrained(step=1, incarnation=1, num_groups=1, num_samples=1, num_tokens=1, metrics=metrics)
    back = decode(*encode(trained))
    assert isinstance(back, BatchTrained)
    assert back.metrics == {"train/lr": 0.5}
    assert (back.not_finite, back.not_finite_values) == (("train/loss", "train/grad_norm"), ("nan", "inf"))
    again = msgspec.structs.replace(back, step=2)
    assert (again.not_finite, again.not_finite_values) == (back.not_finite, back.not_finite_values)
    assert str(not_finite_in(back)) == "{'train/loss': nan, 'train/grad_norm': inf}"


def test_an_older_event_names_its_metrics_that_are_no_numbers_alone() -> None:
    old = EvalEnded(incarnation=1, step=2, version=3, metrics={}, not_finite=("eval/s",))
    assert str(not_finite_in(old)) == "{'eval/s': nan}"
