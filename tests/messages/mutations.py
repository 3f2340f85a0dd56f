"""Real messages of every type, mutated at random: what comes from outside, as far as chance can think of it.

python -m tests.messages.mutations --cases 1000000 --seed 7
"""

import argparse
import sys
import time
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from random import Random, SystemRandom
from typing import Any, NamedTuple

import msgspec

from messages import (
    DecodeError,
    Float32Array,
    Int32Array,
    Message,
    Segment,
    UInt8Array,
    WeightSpan,
    decode,
    encode,
    message_types,
)
from messages.arrays import PackedArray
from messages.codec import CONTENT_TYPE_HEADER, JSON, MSGPACK, TYPE_HEADER

ODD = (  # that a decoder may stumble over
    b"",
    b"null",
    b"-1",
    b"1e999",
    b"-0.0",
    b"9" * 30,
    b"9" * 5000,
    b'"\\ud800"',
    b"\xff\xfe",
    b"\x00",
    b'"' * 9,
    b"[" * 200,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\x91" * 200,
    b"\x91" * 3000,
    b"\x81\xa1a" * 1500,
    b"\xdd\xff\xff\xff\xff",  # a list of four billion things
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xc7\x03\x01abc",
    b"\xd6\xff\x00\x00\x00\x01",  # a time
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
    b"\xc0",
    b"\xc1",  # never used
    b"[1,[2],3]",
    b'[null,"1",1e308]',
)
OPEN: dict[str, Any] = {"a": [1, -2.5, "x", None, {"b": True}], "c": {"d": []}}


class Case(NamedTuple):
    """Something that may come."""

    payload: bytes
    headers: dict[str, str]


def example(kind: Any) -> Any:
    """A value of a type as the messages use it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return OPEN
    if kind is Segment:
        return _segment()
    if origin is dict:
        return {"k": example(parts[1])}
    if origin is list:
        return [example(parts[0])]
    if origin is tuple:
        return (example(parts[0]), example(parts[0]))
    if origin is typing.Literal:
        return parts[0]
    if parts:  # a union
        return example(parts[0])
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
    if issubclass(kind, PackedArray):
        return kind([1, 2, 3])
    if issubclass(kind, Enum):
        return next(iter(kind))
    plain: dict[type, Any] = {int: 7, float: 0.5, str: "text é", bytes: b"\x00\xff", bool: True}
    return plain[kind]


def _segment() -> Segment:
    fields: dict[str, Any] = {
        name: example(hint)
        for name, hint in typing.get_type_hints(Segment).items()
        if name in Segment.__struct_fields__
        and name not in ("loss_mask", "rollout_log_probs", "weight_spans", "routed_experts", "kept_counts", "kept_ids")
    }
    routed = Int32Array([0] * 2 * (len(fields["prompt_ids"]) + 3))
    spans = (WeightSpan(version=1, start=0, end=3),)
    return Segment(
        **fields,
        loss_mask=UInt8Array([1, 1, 0]),
        rollout_log_probs=Float32Array([-1, -2, -3]),
        weight_spans=spans,
        routed_experts=routed,
        kept_counts=Int32Array([2, 1, 0]),
        kept_ids=Int32Array([1, 2, 3]),
    )


def real_cases() -> list[Case]:
    """Each message type in both encodings."""
    messages: list[Message] = [example(message_type) for message_type in message_types().values()]
    cases = [Case(*encode(message, content_type=JSON)) for message in messages]
    return cases + [Case(*encode(message, content_type=MSGPACK)) for message in messages]


def mutated(rng: Random) -> Iterator[Case]:
    """Cases without end, each some mutations away from a real message."""
    real = real_cases()
    while True:
        case = rng.choice(real)
        data, headers = bytearray(case.payload), case.headers
        for _ in range(1 + int(4 * rng.random() ** 2)):
            rng.choice(MUTATIONS)(rng, data, real)
        if rng.random() < 0.05:
            other = rng.choice(real).headers
            headers = {TYPE_HEADER: other[TYPE_HEADER], CONTENT_TYPE_HEADER: rng.choice((JSON, MSGPACK))}
        yield Case(bytes(data), headers)


def _at(rng: Random, data: bytearray) -> int:
    return int(rng.random() * (len(data) + 1))


def _change_byte(rng: Random, data: bytearray, real: list[Case]) -> None:
    if data:
        data[int(rng.random() * len(data))] = rng.getrandbits(8)


def _flip_bit(rng: Random, data: bytearray, real: list[Case]) -> None:
    if data:
        data[int(rng.random() * len(data))] ^= 1 << rng.getrandbits(3)


def _cut(rng: Random, data: bytearray, real: list[Case]) -> None:
    begin = _at(rng, data)
    del data[begin : begin + rng.getrandbits(4)]


def _truncate(rng: Random, data: bytearray, real: list[Case]) -> None:
    del data[_at(rng, data) :]


def _repeat(rng: Random, data: bytearray, real: list[Case]) -> None:
    begin = _at(rng, data)
    data[begin:begin] = data[begin : begin + rng.getrandbits(6)]


def _insert_odd(rng: Random, data: bytearray, real: list[Case]) -> None:
    begin = _at(rng, data)
    data[begin:begin] = rng.choice(ODD)


def _replace_number(rng: Random, data: bytearray, real: list[Case]) -> None:
    """What stands where the example has its 7, in either encoding."""
    begin = data.find(b"7" if rng.random() < 0.5 else b"\x07", _at(rng, data))
    if begin >= 0:
        data[begin : begin + 1] = rng.choice(ODD)


def _replace_list(rng: Random, data: bytearray, real: list[Case]) -> None:
    begin = data.find(b"[" if rng.random() < 0.5 else b"\x93", _at(rng, data))
    if begin >= 0:
        data[begin : begin + 1] = rng.choice(ODD)


def _splice(rng: Random, data: bytearray, real: list[Case]) -> None:
    other = rng.choice(real).payload
    data[_at(rng, data) :] = other[int(rng.random() * len(other)) :]


MUTATIONS: tuple[Callable[[Random, bytearray, list[Case]], None], ...] = (
    _change_byte,
    _flip_bit,
    _cut,
    _truncate,
    _repeat,
    _insert_odd,
    _replace_number,
    _replace_list,
    _splice,
)


def wrong_with(case: Case) -> str:
    """What is wrong with how a case is taken; empty if it was decoded, and can be encoded, or was refused."""
    try:
        message = decode(case.payload, case.headers)
    except DecodeError:
        return ""
    except BaseException as error:  # noqa: BLE001 - any other is what is looked for
        return f"decode raises {error!r}"
    for kind in (JSON, MSGPACK):
        try:
            encode(message, content_type=kind)
        except BaseException as error:  # noqa: BLE001 - as above
            return f"what was decoded cannot be encoded as {kind}: {error!r}"
    return ""


def search(num_cases: int, seed: int) -> list[str]:
    """What was wrong with how so many cases were taken, the first ten."""
    found = ((case, wrong_with(case)) for case in islice(mutated(Random(seed)), num_cases))
    wrong = (f"{what}: {case.headers} {case.payload[:300]!r}" for case, what in found if what)
    return list(islice(wrong, 10))


def main(argv: list[str] | None = None) -> int:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args(argv)
    seed = SystemRandom().getrandbits(32) if args.seed is None else args.seed
    begin = time.perf_counter()
    wrong = search(args.cases, seed)
    lines = [*wrong, f"{args.cases} cases, seed {seed}, {time.perf_counter() - begin:.1f} s: {len(wrong)} wrong"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
