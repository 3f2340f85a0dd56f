"""What speaks against an engine: its label, its checksum beside those of others, its log-probs of the probe."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.engines.weights.verification import (
    IMPOSSIBLE,
    NUM_KNOWN,
    QUANTIZED,
    SMALL_BYTES,
    KnownChecksums,
    ProbeGate,
    ServerInfo,
    gate_of,
    holds_all_digits,
    is_thorough,
    label_mismatch,
    probe_difference,
    probe_mismatch,
    server_of,
    sums_mismatch,
    why_not_compared,
)
from actors.rollout.sglang.control_answers import ChecksumAnswer, RankSums
from messages import EngineSums, WeightProbe
from runtime.models.checksums import digits_of, engine_checksum
from runtime.settings.tables.engines import WeightFormat
from tests.support.rollout import announcement

PROBE = WeightProbe(token_ids=(5, 6, 7), log_probs=(0.0, -1.0, -2.0))
TIGHT = ProbeGate(1e-3, None, "float32")
TP1 = server_of({"version": "0.5.23", "tp_size": 1, "dtype": "float32"})
TP2 = server_of({"version": "0.5.23", "tp_size": 2, "dtype": "float32"})


def test_the_difference_is_the_mean_over_all_tokens_but_the_first() -> None:
    assert probe_difference(PROBE, [None, -1.5, -2.1]) == pytest.approx(0.3)
    assert probe_difference(PROBE, [-9.0, -1.0, -2.0]) == 0.0


@pytest.mark.parametrize("answered", [[], [None, -1.0], [None, -1.0, -2.0, -3.0], [None, None, -2.0]])
def test_a_missing_token_or_number_is_no_proof(answered: list[float | None]) -> None:
    assert probe_difference(PROBE, answered) == math.inf
    assert "differ from the trainer's by inf" in probe_mismatch(PROBE, answered, TIGHT)


def test_what_is_not_a_number_is_no_proof() -> None:
    assert probe_mismatch(PROBE, [None, math.nan, -2.0], TIGHT)


@given(st.lists(st.floats(-0.02, 0.02), min_size=1, max_size=63), st.sampled_from([1e-3, 2e-2]))
def test_a_probe_is_refused_exactly_above_the_tolerance(shifts: list[float], tolerance: float) -> None:
    ids = tuple(range(len(shifts) + 1))
    probe = WeightProbe(token_ids=ids, log_probs=(0.0, *[-1.0] * len(shifts)))
    answered: list[float | None] = [None, *(-1.0 + shift for shift in shifts)]
    refused = bool(probe_mismatch(probe, answered, ProbeGate(tolerance, None, "bfloat16")))
    mean = sum(abs(shift) for shift in shifts) / len(shifts)
    assert refused == (mean > tolerance) or mean == pytest.approx(tolerance)


def test_a_label_is_taken_or_it_is_not() -> None:
    assert label_mismatch("7@e.1", "7@e.1") == ""
    assert label_mismatch("7@e.1", "6@e.1") == "reports weights '6@e.1', expected '7@e.1'"
    assert label_mismatch("7@e.1", None)


def test_the_same_files_give_the_same_checksum_in_one_layout() -> None:
    known = KnownChecksums()
    assert known.mismatch(TP1, "files", "a", all_digits=True) == ""
    known.add(TP1.layout, "first", "files", "a")
    assert known.mismatch(TP1, "files", "a", all_digits=True) == ""
    assert known.mismatch(TP1, "files", "b", all_digits=True) == (
        "its checksum is b, that of first is a for the same files"
    )
    assert known.mismatch(TP2, "files", "b", all_digits=True) == ""


def test_other_files_give_another_checksum() -> None:
    known = KnownChecksums()
    known.add(TP1.layout, "first", "old", "a")
    assert known.mismatch(TP1, "new", "a", all_digits=True) == (
        "its checksum is a, that of first for other files: it did not load these"
    )
    assert known.mismatch(TP1, "new", "a", all_digits=False) == ""  # a small step may be rounded away
    assert known.mismatch(TP2, "new", "a", all_digits=True) == ""


@pytest.mark.parametrize("tensors", [None, ""])
def test_an_engine_that_says_no_checksum_is_compared_with_nobody(tensors: str | None) -> None:
    known = KnownChecksums()
    known.add(TP1.layout, "first", "files", "a")
    assert known.mismatch(TP1, "files", tensors, all_digits=True) == ""
    found = ChecksumAnswer(success=True, per_engine_checksum=tensors)
    assert why_not_compared(TP1, SUMS, "", found) == "it reports no checksums"


RANK = {"a": "00", "b": "11", "c": "22"}  # checksums of an engine's tensors
SUMS = EngineSums(
    tp_size=1, dtype="float32", is_padded=False, checksum=engine_checksum([RANK]), tensors=digits_of([RANK])
)
TINY: dict[str, Any] = {"version": "physarum-embedded", "device": "cpu", "dtype": "float32", "tp_size": 1}


def reported(**tensors: str) -> ChecksumAnswer:
    total = engine_checksum([tensors])
    return ChecksumAnswer(success=True, per_engine_checksum=total, ranks=(RankSums(tensors),))


def test_the_tensor_that_differs_from_the_trainers_sums_is_named() -> None:
    assert sums_mismatch(SUMS, reported(**RANK)) == ""
    assert sums_mismatch(SUMS, reported(**(RANK | {"b": "12"}))) == (
        "1 of its 3 tensors differ from the trainer's sums; the first is b"
    )
    assert sums_mismatch(SUMS, reported(**(RANK | {"b": "22", "c": "11"}))) == (
        "2 of its 3 tensors differ from the trainer's sums; the first is b"
    )
    assert sums_mismatch(SUMS, reported(a="00", b="11")) == "it holds 2 tensors, the trainer announced 3"


@given(st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.sampled_from("0123"), min_size=1), st.data())
def test_any_changed_tensor_of_any_rank_is_found(rank: dict[str, str], data: st.DataObject) -> None:
    ranks = [rank, {name: each + "x" for name, each in rank.items()}]
    sums = EngineSums(
        tp_size=2, dtype="float32", is_padded=True, checksum=engine_checksum(ranks), tensors=digits_of(ranks)
    )
    name, number = data.draw(st.sampled_from(sorted(rank))), data.draw(st.integers(0, 1))
    changed = [dict(each) for each in ranks]
    changed[number][name] = "other"
    answer = ChecksumAnswer(
        success=True, per_engine_checksum=engine_checksum(changed), ranks=tuple(map(RankSums, changed))
    )
    assert sums_mismatch(sums, answer).endswith(f"the first is {name}")


@pytest.mark.parametrize(
    ("info", "is_compared"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"tp_size": 2}, False),
        ({"version": "0.5.23"}, False),  # it pads
        ({"device": "cuda"}, False),
        ({"quantization": "fp8"}, False),
        ({"pp_size": 2}, False),
        ({"ep_size": 2}, False),
    ],
)
def test_sums_are_compared_with_engines_that_hold_tensors_alike(info: dict[str, Any], is_compared: bool) -> None:
    found, server = reported(**RANK), server_of(TINY | info)
    assert (why_not_compared(server, SUMS, "", found) == "") == is_compared
    assert why_not_compared(server, None, "", found) == "the trainer announced no sums of them"
    assert why_not_compared(server, None, "no engine loads them", found) == "no engine loads them"


@given(st.lists(st.tuples(st.sampled_from([TP1, TP2]), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_of_engines_that_say_nothing_against_each_other_files_and_checksums_pair_off(
    loads: list[tuple[ServerInfo, int, int]],
) -> None:
    known, kept = KnownChecksums(), set[tuple[ServerInfo, int, int]]()
    for server, files, tensors in loads:
        if not known.mismatch(server, str(files), str(tensors), all_digits=True):
            known.add(server.layout, "e", str(files), str(tensors))
            kept.add((server, files, tensors))
    for server in (TP1, TP2):
        pairs = {(files, tensors) for layout, files, tensors in kept if layout == server}
        assert len(pairs) == len({files for files, _ in pairs}) == len({tensors for _, tensors in pairs})


def test_what_is_remembered_is_bounded() -> None:
    known = KnownChecksums()
    for number in range(NUM_KNOWN + 1):
        known.add(TP1.layout, "e", f"files {number}", f"tensors {number}")
    assert known.mismatch(TP1, "new", "tensors 0", all_digits=True) == ""
    assert known.mismatch(TP1, "new", "tensors 1", all_digits=True)


@pytest.mark.parametrize(
    ("info", "trainer", "weight_format", "floor", "all_digits"),
    [
        ({"dtype": "float32"}, "float32", "as_trained", 1e-3, True),
        ({"dtype": "bfloat16"}, "bfloat16", "as_trained", 2e-2, True),
        ({"dtype": "float32"}, "bfloat16", "as_trained", 2e-2, True),
        ({"dtype": "bfloat16"}, "float32", "as_trained", 2e-2, False),
        ({"dtype": "auto"}, "float32", "as_trained", 2e-2, False),  # SGLang makes float16 of it
        ({"dtype": "float32", "quantization": "fp8"}, "float32", "as_trained", 1e-3 + QUANTIZED, False),
        ({}, "float32", "as_trained", 2e-2, False),
        ({"dtype": "float32"}, "float32", "bfloat16", 2e-2, True),  # holds what came, which is not what was trained
        ({"dtype": "bfloat16"}, "float32", "bfloat16", 2e-2, True),
        ({"dtype": "float16"}, "bfloat16", "bfloat16", 2e-2, False),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "bfloat16", "fp8", 2e-2 + QUANTIZED, False),
        ({"dtype": "bfloat16"}, "float32", "fp8", 2e-2 + QUANTIZED, False),  # a server that does not say it
    ],
)
def test_how_exact_an_engine_must_be_is_said_by_its_dtype_and_the_trainers(
    info: dict[str, Any], trainer: str, weight_format: WeightFormat, floor: float, all_digits: bool
) -> None:
    """A trainer of an earlier version has measured nothing, and of a toy the spread is below the floor."""
    server = server_of(info)
    for probe in (PROBE, with_spreads(float32=1e-6, bfloat16=4e-3)):
        assert gate_of(probe, server, trainer, weight_format).tolerance == floor
    assert holds_all_digits(server, trainer, weight_format) == all_digits


def with_spreads(**spreads: float) -> WeightProbe:
    return msgspec.structs.replace(PROBE, spreads=spreads)


@pytest.mark.parametrize(
    ("dtype", "spread", "tolerance"),
    [("bfloat16", 0.06, 0.15), ("bfloat16", 0.13, IMPOSSIBLE), ("float32", 0.002, 0.005), ("float32", 1e-5, 1e-3)],
)
def test_an_engine_may_differ_by_a_multiple_of_what_rounding_does_to_the_trainer(
    dtype: str, spread: float, tolerance: float
) -> None:
    probe = with_spreads(**{"float32": 1e-6, "bfloat16": 1e-6, dtype: spread})
    gate = gate_of(probe, server_of({"dtype": dtype}), dtype)
    assert gate.tolerance == pytest.approx(tolerance)
    right: list[float | None] = [None, -1.0 + 0.99 * tolerance, -2.0 - 0.99 * tolerance]
    wrong: list[float | None] = [None, -1.0 + 1.04 * tolerance, -2.0 - 1.04 * tolerance]
    assert probe_mismatch(probe, right, gate) == ""
    assert probe_mismatch(probe, wrong, gate) == (
        f"its log-probs of the probe differ from the trainer's by {1.04 * tolerance:.2g} nats on average; "
        f"allowed: {tolerance:.2g}; rounding in {dtype} moves the trainer's own by {spread:.2g}"
    )


def test_who_is_asked_how_much() -> None:
    small, large = announcement(1, size_bytes=SMALL_BYTES), announcement(1, size_bytes=SMALL_BYTES + 1)
    for first in (False, True):
        assert is_thorough(None, small, first=first)
        assert is_thorough("always", large, first=first)
        assert not is_thorough("never", small, first=first)
        assert is_thorough(None, large, first=first) == is_thorough("first", small, first=first) == first
