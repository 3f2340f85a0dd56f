"""Which scores are tried again, by the cause of their failure."""

import time
from collections.abc import Sequence
from email.utils import formatdate

import anyio
import pytest

from actors.reward.causes import Cause, cause_of, retry_after_s, seconds_of
from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import Grading, graded_again
from actors.reward.recipe import retried_causes
from actors.reward.samples import GradedSample
from runtime.util.retrying import Backoff
from tests.build.topology import topology_with

SAMPLES = [GradedSample(response=text) for text in ("a", "b", "c")]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.reward.gradings.PAUSES", Backoff(first_s=0.0, max_s=0.0))


class Grader:
    """Fails the first grades of "b" with a cause."""

    def __init__(self, cause: Cause, num_failures: int) -> None:
        self.cause: Cause = cause
        self.num_failures = num_failures
        self.calls: list[str] = []

    async def __call__(self, samples: Sequence[GradedSample]) -> list[Graded]:
        self.calls.append("".join(sample.response for sample in samples))
        return [self._graded(sample) for sample in samples]

    def _graded(self, sample: GradedSample) -> Graded:
        if sample.response != "b" or not self.num_failures:
            return Graded(reward=1.0)
        self.num_failures -= 1
        return Graded(error="failed", cause=self.cause)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("cause", "num_failures", "group", "calls", "ended"),
    [
        ("rate_limited", 2, False, ["abc", "b", "b"], None),
        ("rate_limited", 9, False, ["abc", "b", "b"], "rate_limited"),
        ("worker_lost", 1, True, ["abc", "abc"], None),
        ("raised", 1, False, ["abc"], "raised"),
        ("sandbox_lost", 1, False, ["abc", "b"], None),  # a grader said so, whose own process lives
    ],
)
async def test_a_score_is_tried_again_by_its_cause_and_not_for_ever(
    cause: Cause, num_failures: int, group: bool, calls: list[str], ended: str | None
) -> None:
    grader, causes = Grader(cause, num_failures), retried_causes(topology_with().reward)
    grades = await graded_again(grader, SAMPLES, causes=causes, max_tries=3, max_wait_s=1.0, group=group)
    assert grader.calls == calls
    assert [graded.cause for graded in grades] == [None, ended, None]


@pytest.mark.anyio
@pytest.mark.parametrize(("wanted_s", "waited_s"), [(0.2, 0.2), (3600.0, 0.3), (0.0, 0.0)])
async def test_a_server_is_asked_again_when_it_wants_that_up_to_the_longest_wait(
    wanted_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[float | str] = []

    async def sleep(seconds: float) -> None:
        did.append(seconds)

    async def grade(samples: Sequence[GradedSample]) -> list[Graded]:
        did.append("graded")
        return [Graded(error="status 429", cause="rate_limited", wait_s=wanted_s) for _ in samples]

    monkeypatch.setattr(anyio, "sleep", sleep)
    causes = retried_causes(topology_with().reward)
    await graded_again(grade, SAMPLES[:1], causes=causes, max_tries=2, max_wait_s=0.3, group=False)
    assert did == ["graded", waited_s, "graded"]


def test_retry_after_is_a_number_of_seconds_or_a_date() -> None:
    assert [seconds_of(text) for text in ("7", "0.5", "-3", "soon", "", "nan", "inf")] == [7, 0.5, 0, 0, 0, 0, 0]
    assert seconds_of("Fri, 31 Dec 1999 23:59:59 GMT") == 0
    assert 500 < seconds_of(formatdate(time.time() + 600, usegmt=True)) <= 600
    response = type("Response", (), {"headers": {"Retry-After": "4"}, "status_code": 503})
    error = type("HTTPStatusError", (Exception,), {"response": response()})()
    assert (cause_of(error), retry_after_s(error), retry_after_s(ValueError())) == ("worker_lost", 4.0, 0.0)


@pytest.mark.anyio
async def test_a_sample_that_ended_enough_processes_of_the_pool_is_not_tried_again() -> None:
    tried = Grading(grader=GraderSpec(name="f"), samples=(SAMPLES[0],), timeout_s=1.0)
    tried.fail("exit code -9, 3 times", "sandbox_lost")
    calls: list[int] = []

    async def grade(samples: Sequence[GradedSample]) -> list[Graded]:
        calls.append(len(samples))
        return tried.grades

    causes = retried_causes(topology_with().reward)
    assert (
        await graded_again(grade, SAMPLES[:1], causes=causes, max_tries=3, max_wait_s=1.0, group=False) == tried.grades
    )
    assert calls == [1]


def test_a_lost_sandbox_is_tried_again_whatever_its_rule() -> None:
    assert "sandbox_lost" in retried_causes(topology_with(reward={"failures": {"sandbox_lost": 0.0}}).reward)


class _HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


class ReadError(ConnectionError):
    """Of a lost connection."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("x"), "raised"),
        (TimeoutError(), "timeout"),
        (ReadError(), "worker_lost"),
        (ConnectionRefusedError(), "worker_lost"),
        (_HttpError(429), "rate_limited"),
        (_HttpError(408), "timeout"),
        (_HttpError(404), "refused"),
        (_HttpError(503), "worker_lost"),
        (_HttpError(200), "raised"),
        (SystemExit(2), "raised"),
    ],
)
def test_an_exception_is_classified_by_what_it_says_of_the_server(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) == cause
