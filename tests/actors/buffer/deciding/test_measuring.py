"""Functions of metrics: they get every graded sample of a set, and a bad one costs its own metrics alone."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.buffer.deciding.decide import EvalPlan
from actors.buffer.deciding.measuring import EvalMetrics, MetricsError, admitted, answering, samples_of
from messages import EvalCompleted, EvalEnded, Int32Array, Prompt
from runtime.ledger.batches import KEPT_BYTES
from runtime.ledger.fold import Evaluation
from runtime.ledger.snapshots import pack_state, unpack_state
from runtime.settings.sizes import MAX_OWN_METRICS, OWN_METRICS_BYTES
from tests.build.samples import summary
from tests.build.topology import topology_with
from tests.support.ledger_log import Log

FUNCTIONS = """
import pathlib, time
import numpy as np
def moody(samples):
    calls = pathlib.Path(__file__).with_name("calls")
    before = calls.read_text() if calls.exists() else ""
    calls.write_text(before + "x")
    if len(before) == 0:
        return {}["nothing"]
    if len(before) == 1:
        time.sleep(60)
    assert [(s.item, s.index, s.label, s.metadata) for s in samples] == [
        (0, 0, "a", {"row": 0}), (0, 1, "a", {"row": 0}), (1, 0, "a", {"row": 1})
    ]
    graded = [s.reward for s in samples if s.reward is not None]
    return {"mean": np.float32(sum(graded) / len(graded)), "count": np.int64(len(samples))}
def shows(samples): return {"mean": range(len(samples))}
"""
PROMPTS = tuple(
    Prompt(data="s", row=row, text="p", prompt_ids=Int32Array([1]), label="a", metadata={"row": row})
    for row in range(2)
)
pytestmark = pytest.mark.anyio


def log_of(*names: str, keeps: bool = True, score: Any = None) -> Log:
    """An evaluation of two prompts a set that has all its samples; the second one of the first has no grade."""
    log = Log(evals=tuple(EvalPlan(name=name, interval=1, num_items=2, keeps=keeps) for name in names))
    log.announce(0)
    log.decide()
    graded = msgspec.structs.replace(summary(0, (1, 0), reward=1.0), score=score)
    for item, samples in ((1, (graded,)), (0, (graded, summary(1, (2, 0), reward=None)))):
        for name in names:
            log.add(EvalCompleted(step=0, set=name, item=item, version=1, instance="r", samples=samples))
    return log


def evaluation_of(log: Log) -> Evaluation:
    assert log.state.evaluation is not None
    return log.state.evaluation


async def test_a_function_that_fails_costs_its_own_metrics_alone(tmp_path: Path) -> None:
    """It is called once for an evaluation, also if its end is decided again, and answers after it hung."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    item = {"name": "s", "path": "none", "interval": 1, "custom_metrics": f"{tmp_path}/mine.py:moody"}
    ends, shown = list[EvalEnded](), list[tuple[str, str]]()

    async def show(key: str, trace: str) -> None:
        shown.append((key, trace.splitlines()[-1]))

    metrics = EvalMetrics(topology_with(eval=[item]), show, timeout_s=2.0)
    await metrics.start()
    try:
        for step in (0, 0, 1, 2):
            ended = EvalEnded(incarnation=1, step=step, version=1, metrics={"eval/s": 0.5})
            ends.append(await metrics.added(ended, evaluation_of(log_of("s")), {"s": PROMPTS}))
    finally:
        await metrics.close()
    assert [(ended.metrics, ended.failed) for ended in ends] == [
        ({"eval/s": 0.5}, {"s": "eval.0.custom_metrics: KeyError('nothing')"}),
        ({"eval/s": 0.5}, {"s": "eval.0.custom_metrics: KeyError('nothing')"}),
        ({"eval/s": 0.5}, {"s": "eval.0.custom_metrics: no answer within 2 s"}),
        ({"eval/s": 0.5, "eval/s/mean": 1.0, "eval/s/count": 3.0}, {}),
    ]
    assert shown == [("eval.0.custom_metrics", "KeyError: 'nothing'")]


async def test_an_evaluation_that_began_without_the_function_says_so() -> None:
    item = {"name": "s", "path": "none", "interval": 1, "custom_metrics": "mine.py:means"}
    ended = EvalEnded(incarnation=1, step=0, version=1, metrics={})
    ended = await EvalMetrics(topology_with(eval=[item])).added(
        ended, evaluation_of(log_of("s", keeps=False)), {"s": PROMPTS}
    )
    assert "its samples were not kept" in ended.failed["s"]


def test_what_a_message_cannot_hold_is_refused_as_it_is_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    samples = msgspec.msgpack.encode(samples_of(evaluation_of(log_of("s")), "s", PROMPTS))
    answer = answering("eval.0.custom_metrics", f"{tmp_path}/mine.py:shows")(samples)
    with pytest.raises(MetricsError, match=r"its metric mean is 'range\(0, 3\)'; expected a finite number"):
        admitted(msgspec.msgpack.decode(answer))


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [1.0],
        {"a": math.nan},
        {"a": -math.inf},
        {"a": 10**400},
        {"a": True},
        {"a": "1"},
        {"a b": 1.0},
        {"": 1.0},
        {"../x": 1.0},
        {1: 1.0},
        {str(number): 1.0 for number in range(65)},
    ],
)
def test_an_answer_that_is_no_metrics_is_refused(answer: object) -> None:
    with pytest.raises(MetricsError):
        admitted(answer)


def test_the_most_metrics_with_the_longest_names_fit_into_their_bound() -> None:
    answer = {f"{number:064}": -1e-300 / 3 for number in range(MAX_OWN_METRICS)}
    name = "s" * 64  # the longest of a set
    metrics = {f"eval/{name}/{metric}": value for metric, value in admitted(answer).items()}
    assert len(msgspec.json.encode(metrics)) <= OWN_METRICS_BYTES


def test_an_answer_is_numbers_by_name() -> None:
    assert admitted({"maj.4": 1, "a-b_c": 0.5}) == {"maj.4": 1.0, "a-b_c": 0.5}
    assert admitted({}) == {}


def test_the_ledger_keeps_samples_for_a_function_alone_and_a_snapshot_holds_them() -> None:
    log = log_of("s", score={"pred": "4"})
    state = unpack_state((packed := pack_state(log.state)).chunks, packed.digest)
    assert state.evaluation == log.state.evaluation
    kept = samples_of(evaluation_of(log), "s", PROMPTS)
    assert [(sample.item, sample.reward, sample.score) for sample in kept] == [
        (0, 1.0, {"pred": "4"}),
        (0, None, None),
        (1, 1.0, {"pred": "4"}),
    ]
    assert samples_of(evaluation_of(log_of("s", keeps=False)), "s", PROMPTS) == []


def test_scores_that_are_too_large_are_left_out_and_counted() -> None:
    items = evaluation_of(log_of("s", score={"pred": "4" * KEPT_BYTES})).items["s"]
    assert [(item.is_cut, item.rewards, item.samples[0].score) for item in items.values()] == [(True, (1.0,), None)] * 2
