"""An external reward worker: grades the score requests of one grader on a machine that is not a node of the run."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Final

import anyio
from anyio.abc import TaskGroup

from actors.reward.answers import StoredPrompts, answers_of, sample_of
from actors.reward.batches import Batches
from actors.reward.grades import Graded, GraderSpec
from actors.reward.gradings import CallLimits
from actors.reward.pool import GraderPool, PoolSettings, open_pool
from messages import ScoreRequested
from messages.plain import clipped
from runtime.bus.background import in_background
from runtime.bus.consumer import Delivery
from runtime.bus.credential import Credential
from runtime.bus.errors import BusRefused, BusUnavailable, MessageRefused, PayloadLost
from runtime.external.score_requests import ScoreRequests, open_score_requests
from runtime.util.formatting import count_of
from runtime.util.retrying import Backoff
from runtime.util.tracebacks import places_in

COUNTS_EVERY_S: Final = 30.0
FINISH_S: Final = 5.0  # after a stop, for the requests that are being graded; the others go back at once
GIVE_BACK_TIMEOUT_S: Final = 1.0
CAUSES_KEPT: Final = 256  # causes of failed grades that are shown once each
BACKOFF: Final = Backoff(first_s=0.5, max_s=15.0)  # between attempts to connect

Show = Callable[[str], None]


class CredentialRefused(Exception):
    """The run's server rejects the credential. The text says why."""


class ExternalWorker:
    """Grades the score requests that a credential allows, with one function, in processes that may be killed.

    A crash costs a redelivery: the run delivers unacknowledged requests again, to this or another worker.
    """

    def __init__(
        self,
        credential: Credential,
        grader: str,
        settings: PoolSettings,
        show: Show,
        *,
        batch: int | None = None,
        wait_s: float = 0.05,
    ) -> None:
        """Start without a connection.

        Args:
            credential: of a grader.
            grader: "module:function" or "path/file.py:function".
            settings: of the grader processes.
            show: prints a line for the user.
            batch: samples of many requests that one call gets as a list, at most. None: a call gets one sample.
            wait_s: seconds that a sample waits for others of its batch.
        """
        self._batch = batch
        self._wait_s = wait_s
        self._batches: Batches | None = None
        self._credential = credential
        self._grader = grader
        self._settings = settings
        self._show = show
        self._counts: Counter[str] = Counter()
        self._num_in_hand = 0
        self._causes: set[tuple[str, ...]] = set()
        self._pulling: anyio.CancelScope | None = None  # while the worker is connected
        self._stopping = False

    async def run(self) -> None:
        """Grade until `stop`, and connect again whenever the connection is lost.

        Raises:
            CredentialRefused: the server rejects the credential, which has expired or was revoked.
            GraderUnusableError: the grader cannot be loaded.
            GraderStartError: grader processes do not start.
        """
        async with AsyncExitStack() as opened:
            pool = await opened.enter_async_context(open_pool(self._settings))
            await opened.enter_async_context(in_background(self._show_counts))
            if self._batch is not None:
                limits = CallLimits(timeout_s=self._settings.timeout_s)
                spec = GraderSpec(name=self._grader, group=True)
                self._batches = Batches(pool, spec, size=self._batch, wait_s=self._wait_s, limits=limits)
                await opened.enter_async_context(in_background(self._batches.run))
            failures = 0
            while not self._stopping:
                connected = self._counts["connections"]
                try:
                    await self._serve(pool)
                except BusRefused as error:
                    raise CredentialRefused(self._why_refused(datetime.now(UTC))) from error
                except BusUnavailable as error:
                    failures = 1 if self._counts["connections"] > connected else failures + 1
                    if failures.bit_count() == 1:  # 1, 2, 4, 8, ...
                        self._show(f"not connected, trying again: {error}")
                    await anyio.sleep(BACKOFF.pause_s(failures))
        self._show(f"stopped; {self._totals()}")

    def stop(self) -> None:
        """Take no further requests; `run` returns once those in hand are graded, or given back after FINISH_S."""
        self._stopping = True
        if self._pulling is not None:
            self._pulling.cancel()

    def _why_refused(self, now: datetime) -> str:
        credential = self._credential
        if credential.is_expired(now):
            return f"the credential of {credential.name} expired at {credential.expires:%Y-%m-%d %H:%M} UTC"
        return f"the run {credential.run} refuses the credential of {credential.name}: it was revoked, or is unknown"

    async def _serve(self, pool: GraderPool) -> None:
        """Connect, and grade until the connection is lost or `stop` is called."""
        credential = self._credential
        async with open_score_requests(credential, self._show) as requests:
            self._counts["connections"] += 1
            self._show(f"connected to {credential.url} as {credential.name}: run {credential.run}, {credential.grader}")
            prompts = StoredPrompts(requests)
            async with anyio.create_task_group() as grading:
                with anyio.CancelScope() as self._pulling:
                    if self._stopping:
                        self._pulling.cancel()
                    await self._take_all(pool, requests, prompts, grading)
                self._pulling = None
                grading.cancel_scope.deadline = anyio.current_time() + FINISH_S

    async def _take_all(
        self, pool: GraderPool, requests: ScoreRequests, prompts: StoredPrompts, grading: TaskGroup
    ) -> None:
        """Start to grade requests as they arrive, up to a number at a time."""
        calls = pool.calls_at_once(GraderSpec(name=self._grader))
        room = anyio.Semaphore(calls if self._batches is None else self._batches.requests_at_once)

        async def grade_one(delivery: Delivery[ScoreRequested]) -> None:
            try:
                await self._answer(pool, requests, prompts, delivery)
            finally:
                room.release()

        while True:
            await room.acquire()
            delivery = await requests.deliveries.next()
            assert delivery is not None
            grading.start_soon(grade_one, delivery)

    async def _answer(
        self, pool: GraderPool, requests: ScoreRequests, prompts: StoredPrompts, delivery: Delivery[ScoreRequested]
    ) -> None:
        request = delivery.message
        self._counts["requests"] += 1
        self._num_in_hand += 1
        try:
            if not requests.takes_scores(request.reply_to):
                await delivery.reject(f"reply_to {clipped(request.reply_to, 80)!r} takes no answers of this grader")
                return
            async with delivery.heartbeat():
                grades = await self._grade(pool, prompts, request)
                if grades is not None:
                    await _send(requests, request, grades)
        except anyio.get_cancelled_exc_class():
            self._counts["given_back"] += 1
            with anyio.move_on_after(GIVE_BACK_TIMEOUT_S, shield=True):
                await delivery.redeliver()
            raise
        finally:
            self._num_in_hand -= 1
        await delivery.ack()

    async def _grade(self, pool: GraderPool, prompts: StoredPrompts, request: ScoreRequested) -> list[Graded] | None:
        """Grade a request; return None if its caller no longer waits."""
        spec = GraderSpec(name=self._grader, group=request.group_rm)
        with anyio.move_on_after(request.timeout_s or math.inf):
            try:
                items = await prompts.items_of(request)
            except PayloadLost as error:
                return [Graded(error=f"prompt: {error}", cause="worker_lost") for _ in request.items]
            samples = [sample_of(item, request) for item in items]
            together = self._batches if not request.group_rm else None
            grades = await (pool.grade(spec, samples) if together is None else together.grade(samples))
            self._note(grades)
            return grades
        self._counts["late"] += 1
        return None

    def _note(self, grades: Sequence[Graded]) -> None:
        """Count grades, and show each cause of a failure once."""
        self._counts["samples"] += len(grades)
        for graded in grades:
            if graded.error is None:
                continue
            self._counts["failed"] += 1
            cause = cause_of(graded)
            if cause not in self._causes and len(self._causes) < CAUSES_KEPT:
                self._causes.add(cause)
                self._show(f"the grader failed: {graded.error}\n{graded.trace or ''}".rstrip())

    async def _show_counts(self) -> None:
        shown = self._totals()
        while True:
            await anyio.sleep(COUNTS_EVERY_S)
            if (totals := self._totals()) != shown:
                shown = totals
                self._show(f"{totals}; {self._num_in_hand} being graded")

    def _totals(self) -> str:
        counts = self._counts
        parts = [f"{count_of(counts['samples'], 'sample')} of {count_of(counts['requests'], 'request')} graded"]
        parts += [
            f"{counts[name]} {name.replace('_', ' ')}" for name in ("failed", "late", "given_back") if counts[name]
        ]
        return ", ".join(parts)


def cause_of(graded: Graded) -> tuple[str, ...]:
    """What failed grades of one cause have in common: the places in their tracebacks, or the error."""
    places = places_in(graded.trace or "")
    return places or (graded.error or "",)


async def _send(requests: ScoreRequests, request: ScoreRequested, grades: Sequence[Graded]) -> None:
    """Send the scores. If they exceed the message size, send them without details, or else as failures."""
    for scores in answers_of(request, grades):
        try:
            await requests.answer(scores, to=request.reply_to)
        except MessageRefused:
            continue
        return
