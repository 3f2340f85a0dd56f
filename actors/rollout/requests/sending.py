"""Sends requests to verified engines, and resends lost ones."""

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.fleet import Fleet
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.isolation import IsolationRuns
from actors.rollout.requests.quarantine import DeathRecord, RequestStatus
from actors.rollout.requests.request import Generated, GenerateRequest
from actors.rollout.sglang.answers import NOTHING, Answer, is_aborted, labels_of, oldest_version
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient, expected_answers
from actors.rollout.sglang.errors import (
    BadAnswer,
    EngineBusy,
    EngineFailed,
    EnginesUnwilling,
    EngineUnavailable,
    RequestRefused,
    TokensUnverified,
)
from actors.rollout.sglang.served_model import ServedModel
from actors.rollout.sglang.streams import Stream
from runtime.util.retrying import Backoff

log = structlog.get_logger()

# before a lost request is resent, by the number of failures since the last engine crash
RESEND = Backoff(first_s=0.5, max_s=8.0)
MAX_FAILURES = 10  # failures of one request before it counts as the cause
STREAM_ABOVE = 256  # maximum new tokens of a request without streaming: repeating it is cheaper than streaming


class Destination(NamedTuple):
    """The target of a request."""

    url: str  # of the router or an engine
    engine: Engine | None = None  # set if the request bypasses the router
    alone: bool = False  # the engine has no other request of this run


@dataclass
class Failures:
    """The failed attempts of one request."""

    tries: int = 0
    failures: int = 0  # failures that the request itself may have caused
    lost: int = 0  # failed tries since an engine last crashed or none was up
    since: float = math.inf  # time of the first failure
    engine: str = ""  # the engine of the last failure, if known


class Generator:
    """Generates through the router; `running` tracks the running requests so that a halt can abort them.

    Requests with `return_sampling_mask` go to the engines directly, in turn.
    """

    def __init__(
        self, client: SglangClient, fleet: Fleet, model: ServedModel, *, give_up_after_s: float = 14_400.0
    ) -> None:
        """Generate on the engines of a fleet.

        Args:
            client: for the engines and the router.
            fleet: the engines.
            model: the model that they serve.
            give_up_after_s: seconds without any usable answer from running engines before a request is given up.
        """
        self._client = client
        self._fleet = fleet
        self._model = model
        self._give_up_after_s = give_up_after_s
        self.running = RunningRequests(client, fleet)
        self._isolation_runs = IsolationRuns(fleet, self.running)
        self._records: dict[str, DeathRecord] = {}  # crash records of samples whose engines crashed

    async def generate(
        self, request: GenerateRequest, show: Callable[[Stream], None] | None = None
    ) -> Generated | None:
        """Send a request to an engine that may answer it; resend it if it is lost.

        While engines or the router are down, it waits for their node daemon to restart them, without a limit. If they
        are up and fail, it retries on other engines with growing pauses, up to a limit. A long request is streamed; if
        it is lost, its tokens so far are the answer.

        Args:
            request: the request.
            show: called with each new stream; None: no streaming.

        Returns:
            None if the round was halted before the request was sent.

        Raises:
            RequestRefused: the model or the engine rules the request out, engines crash on it (quarantine.py), or they
                fail on it too often while they answer others.
            EnginesUnwilling: no request was answered for `give_up_after_s`.
        """
        self._check(request)
        sample, generated = sample_of(request.rid), None
        try:
            generated = await self._generate(request, sample, show)
        finally:
            if generated is None or not generated.cut_short:  # otherwise it is continued by another request
                self._records.pop(sample, None)
        return generated

    async def _generate(
        self, request: GenerateRequest, sample: str, show: Callable[[Stream], None] | None
    ) -> Generated | None:
        failures = Failures()
        while True:
            async with self._place(request, sample, failures) as place:
                if place is None:
                    return None
                if await self.running.wait_for_sweep():
                    continue
                rid = f"{request.rid}-{failures.tries}"
                failures.tries += 1
                stream = self._stream_for(rid, request, show)
                sent_at = anyio.current_time()
                try:
                    return await self._ask(rid, request, stream, place)
                except EngineUnavailable as error:
                    log.warning("request_lost", rid=rid, tries=failures.tries, error=str(error))
                    died = await self._note_death(sample, place, stream, sent_at)
                    if died or not self._fleet.serves:
                        failures.lost = 0
                    elif not isinstance(error, TokensUnverified):
                        await self._note_failure(sample.rpartition("-")[0], place, failures, error)
            await anyio.sleep(RESEND.pause_s(failures.lost))
            if stream is not None and (kept := await self._kept(stream, request.min_version)) is not None:
                return Generated([kept], cut_short=True)

    async def _note_failure(self, group: str, place: Destination, failures: Failures, error: EngineUnavailable) -> None:
        """Record a failure of a running engine and report it. Give the request up after too many.

        Raises:
            RequestRefused: the request is the likely cause: engines answer others.
            EnginesUnwilling: engines answer no request.
        """
        counts, now = not isinstance(error, EngineBusy), anyio.current_time()
        failures.lost += 1
        failures.failures += counts
        failures.since = min(failures.since, now)
        engine = place.engine or self._fleet.engine_behind(error.label)
        failures.engine = engine.name if engine is not None else ""
        who = f"{engine.name} ({engine.url})" if engine is not None else self._fleet.admitted_names()
        problem = error.problem if isinstance(error, BadAnswer) else str(error)
        reason = problem.removeprefix(f"{place.url}/generate: ")
        self._fleet.events.failed(who, type(error).__name__, reason)
        if engine is not None:
            await self._fleet.note_failure(engine, group, reason, counts=counts)
        outcomes = self._fleet.request_outcomes
        others_answered = outcomes.any_answered_since(failures.since)
        if failures.failures >= MAX_FAILURES and (others_answered or outcomes.fails_alone(group)):
            raise RequestRefused(f"failed {failures.failures} times, last at {who}: {reason}") from error
        if now - failures.since >= self._give_up_after_s:
            if others_answered:
                raise RequestRefused(f"failed for {self._give_up_after_s:g} s, last at {who}: {reason}") from error
            raise self._unwilling(f"{who}: {reason}") from error

    def _unwilling(self, reason: str) -> EnginesUnwilling:
        limit = f"{self._give_up_after_s:g} s (rollout.generate_timeout_s)"
        return EnginesUnwilling(f"running engines answered no request for {limit}; last failure: {reason}")

    async def _wait_ready(self, request: GenerateRequest, halted: Callable[[], bool]) -> bool:
        """Wait for an engine that accepts requests; return False if the round was halted first.

        Raises:
            EnginesUnwilling: there is none for too long, and the run cannot restart any.
        """
        while True:
            with anyio.move_on_after(self._give_up_after_s):
                return await self._fleet.wait_ready(request.min_version, unless=halted)
            refused = self._fleet.refused_by()
            if refused:
                raise self._unwilling(refused)

    @asynccontextmanager
    async def _place(
        self, request: GenerateRequest, sample: str, failures: Failures
    ) -> AsyncGenerator[Destination | None]:
        """Wait until a request may be sent and yield its destination; None if its round was halted first.

        Raises:
            RequestRefused: engines crash on it.
            EnginesUnwilling: no engine accepts requests for too long.
        """

        def halted() -> bool:
            return self.running.halted(request.round)

        record = self._records.get(sample, DeathRecord())
        match record.status:
            case RequestStatus.POISON:
                raise RequestRefused(f"it crashes engines: {record.alone} crashed while it was their only request")
            case RequestStatus.QUARANTINED:
                async with self._isolation_runs.alone(request.min_version, halted) as engine:
                    yield None if engine is None else Destination(engine.url, engine, alone=True)
            case RequestStatus.ORDINARY:
                if not await self._wait_ready(request, halted):
                    yield None
                    return
                failed = failures.engine if failures.lost else ""
                if request.params.return_sampling_mask:
                    engine = self._fleet.next_engine(failed)
                else:
                    engine = self._fleet.another_engine(failed) if failures.lost else None
                yield Destination(self._fleet.router) if engine is None else Destination(engine.url, engine)

    async def _note_death(self, sample: str, place: Destination, stream: Stream | None, sent_at: float) -> bool:
        """Determine whether a request was lost by an engine crash, and record that."""
        record = self._records.get(sample, DeathRecord())
        if place.engine is not None and place.alone:
            crash_cause = await place.engine.crash_cause()
            if crash_cause is None:
                return False
            log.warning("engine_died_of", sample=sample, reason=crash_cause.reason, killed=crash_cause.killed)
            record = record.after_death(alone=True, killed=crash_cause.killed)
        else:
            await self._fleet.report_unavailable()
            engine = "" if stream is None else self._fleet.update_tracker.engine_of(stream.last_label)
            if place.engine is not None:
                engine = place.engine.name
            if not self._fleet.crashes.any_since(sent_at, engine):
                return False
            record = record.after_death(alone=False, killed=False)
        self._records[sample] = record
        return True

    def _stream_for(self, rid: str, request: GenerateRequest, show: Callable[[Stream], None] | None) -> Stream | None:
        if show is None or request.max_new_tokens <= STREAM_ABOVE:
            return None
        (expected,) = expected_answers(self._body(request, rid), self._model.vocab_size)
        stream = Stream(self._fleet.version, self._fleet.update_tracker.trust_from_now_on(), expected)
        show(stream)
        return stream

    async def _kept(self, stream: Stream, min_version: int) -> Answer | None:
        """Return the usable tokens of a lost request; None if there are none, so the original request can be resent."""
        await self._fleet.update_tracker.settled(stream.labels)
        stream.drop_untrusted(self._fleet.update_tracker.is_verified)
        rest = stream.rest()
        if not is_recent(rest, min_version):
            rest = NOTHING
        return rest if rest.output_ids or stream.num_taken else None

    async def _ask(self, rid: str, request: GenerateRequest, stream: Stream | None, place: Destination) -> Generated:
        mark = self.running.interruption_mark()
        answers: list[Answer] = []
        with self.running.entered(rid, request, stream) as sent:
            if place.engine is not None:
                sent.engine = place.engine.name
            try:
                if stream is not None:
                    answers = [await self._stream(rid, request, stream, place)]
                else:
                    answers = await self._client.generate(place.url, self._body(request, rid), self._model.vocab_size)
                    answers = [self._model.ended(answer, answer.output_ids, request.params) for answer in answers]
            except BadAnswer as error:
                engine = place.engine or self._fleet.engine_behind(error.label)
                if engine is None:
                    raise
                raise BadAnswer(f"{engine.name} ({engine.url})", error.problem, error.label) from error
        if sent.given_up:
            who = sent.engine or "the engine that may hold it"
            label = "" if stream is None else stream.last_label
            raise EngineUnavailable(f"{who} {sent.lost or 'generates no token'}", label=label)
        labels = stream.labels if stream is not None else [label for answer in answers for label in labels_of(answer)]
        for label in labels:
            self._fleet.note_token(label, sent.sent_at)
        if not await self._fleet.update_tracker.settled(set(labels)):
            raise TokensUnverified(f"sampled by unverified weights: {', '.join(sorted(set(labels)))}")
        if not all(is_recent(answer, request.min_version) for answer in answers):
            raise EngineFailed(f"sampled by weights older than the required version {request.min_version}")
        interrupted = (
            request.round is not None
            and self.running.interrupted_since(mark)
            and not self.running.halted(request.round)
        )
        aborted = [answer for answer in answers if is_aborted(answer)]
        if aborted and not interrupted and not self.running.halted(request.round):
            if not all(answer.output_ids for answer in aborted):
                raise EngineFailed("it aborted a request without a call to abort it", label=labels[0] if labels else "")
            interrupted = True  # it continues from its tokens
        for label in set(labels):
            await self._fleet.note_answer(label)
        return Generated(answers, cut_short=interrupted and bool(aborted))

    async def _stream(self, rid: str, request: GenerateRequest, stream: Stream, place: Destination) -> Answer:
        try:
            await self._client.stream(place.url, self._body(request, rid), stream)
        except EngineUnavailable:
            if not stream.ended or stream.refused is not None:  # otherwise only the end of the connection is missing
                raise
        rest = stream.rest()
        return self._model.ended(rest, stream.output_ids, request.params) if is_aborted(rest) else rest

    def _body(self, request: GenerateRequest, rid: str) -> dict[str, Any]:
        return generate_body(
            rid,
            request.input_ids,
            request.params,
            max_new_tokens=request.max_new_tokens,
            seeds=request.seeds,
            version=self._fleet.version,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Refuse requests that could crash a server, and with it all other requests."""
        try:
            for ids in request.input_ids:
                self._model.check_ids(ids)
            self._model.check_stop(request.params.stop)
        except ValueError as error:
            raise RequestRefused(f"not sent: {error}") from error


def sample_of(rid: str) -> str:
    """Return the common prefix of a sample's request ids, which are LEASE-INDEX-NUMBER."""
    return rid.rpartition("-")[0] or rid


def is_recent(answer: Answer, min_version: int) -> bool:
    """Whether all tokens of an answer were sampled by at least this weight version."""
    oldest = oldest_version(answer)
    return oldest is None or oldest >= min_version
