"""Sends requests to verified engines, and resends lost ones."""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.serving import Serving
from actors.rollout.engines.weights.adapters import ServedAdapter
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.isolation import IsolationRuns
from actors.rollout.requests.quarantine import DeathRecord, RequestStatus
from actors.rollout.requests.request import GenerateRequest, SampleInput
from actors.rollout.requests.verdict import Asked, End, Isolation, Outcome, end_of, judge
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.checks import ExpectedAnswer
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import (
    AbortedUnasked,
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineFailed,
    EnginesUnwilling,
    EngineUnavailable,
    RequestRefused,
    TokensUnverified,
)
from actors.rollout.sglang.labels import version_of
from actors.rollout.sglang.reading import AdapterLabels, AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from messages import EngineLoad, SampleStatus
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
    adapter: ServedAdapter | None = None  # LoRA adapter that the request names


@dataclass
class Failures:
    """The failed tries of one request."""

    tries: int = 0
    failures: int = 0  # failures that the request itself may have caused
    lost: int = 0  # failed tries since an engine last crashed or none was up
    since: float = math.inf  # time of the first failure
    min_version: int = 0  # weight version that the next try needs


class Try(NamedTuple):
    """One try of a request."""

    rid: str
    place: Destination
    streamed: bool
    sent_at: float  # seconds of the loop's clock
    mark: int | None  # of interruptions before it was sent
    version: int  # weight version of the engine that gets it, or the oldest one that may


class Generator:
    """Generates on the engines that get requests; `running` tracks the requests so that a halt can abort them."""

    def __init__(
        self,
        client: SglangClient,
        serving: Serving,
        model: ServedModel,
        *,
        give_up_after_s: float = 14_400.0,
        keeps_prefixes: bool = False,
    ) -> None:
        """Generate on the engines that get requests.

        Args:
            client: for the engines and the router.
            serving: the engines that get requests.
            model: the model that they serve.
            give_up_after_s: seconds without any usable answer from running engines before a request is given up.
            keeps_prefixes: engines keep cached prefixes during a weight update. An answer whose first token is of newer
                weights than its request names is then sent again. Needs requests to engines by name.
        """
        self._client = client
        self._serving = serving
        self._model = model
        self._give_up_after_s = give_up_after_s
        self._keeps_prefixes = keeps_prefixes
        self.running = RunningRequests(client, serving)
        self._isolation_runs = IsolationRuns(serving, self.running)
        self._records: dict[str, DeathRecord] = {}  # crash records of samples whose engines crashed
        self._failed: dict[str, str] = {}  # the engine that last failed to answer a sample; empty: unknown

    def load_of(self, engine: str) -> EngineLoad | None:
        """Load of the engine with this name; None: there is none."""
        return self._serving.load_of(engine)

    async def generate(self, request: GenerateRequest) -> Outcome:
        """Send a request to an engine that may answer it, and read the answer into the buffers of its samples.

        While engines or the router are down, it waits for their node daemon to restart them, without a limit. If they
        are up and fail, it retries on other engines with growing pauses, up to a limit. Tokens of a lost stream stay.

        Args:
            request: the request. A long one that may be streamed is streamed.

        Returns:
            KEEP: the answer is complete. ABORTED: the round was halted. RESEND: the samples need another request, which
            goes on from their tokens.

        Raises:
            RequestRefused: the model or the engine rules the request out, engines crash on it (quarantine.py), or they
                fail on it too often while they answer others.
            EnginesUnwilling: no request was answered for `give_up_after_s`.
        """
        self._check(request)
        sample, outcome = sample_of(request.rid), Outcome.REFUSE
        try:
            outcome = await self._generate(request, sample)
            return outcome
        finally:
            if outcome is not Outcome.RESEND:  # otherwise it is continued by another request
                self._records.pop(sample, None)
                self._failed.pop(sample, None)

    async def _generate(self, request: GenerateRequest, sample: str) -> Outcome:
        failures = Failures()
        while True:
            async with self._place(request, sample, failures) as place:
                if place is None:
                    return Outcome.ABORTED
                if await self.running.wait_for_sweep():
                    continue
                this = self._next_try(request, failures, place)
                try:
                    end, error = await self._ask(request, this), None
                except EngineError as raised:
                    end, error = end_of(raised), raised
                lost = error is not None and end not in (End.REFUSED, End.OUTDATED)
                died = lost and await self._note_death(sample, request, this)
            outcome = await self._settle(request, sample, this, failures, end, error, died=died)
            if outcome is not None:
                return outcome

    def _next_try(self, request: GenerateRequest, failures: Failures, place: Destination) -> Try:
        """Prepare a try: its id, and readers for its answers."""
        rid = f"{request.rid}-{failures.tries}"
        failures.tries += 1
        streamed = request.may_stream and (request.max_new_tokens > STREAM_ABOVE or request.begun is not None)
        kept = request.params.top_k if request.params.return_sampling_mask else None
        version = self._version_at(place)
        request.engine = "" if place.engine is None else place.engine.name
        request.readers = [
            AnswerReader(
                each.buffer,
                ExpectedAnswer(
                    engine_rid,
                    len(each.prompt_ids) + each.buffer.num_tokens + len(each.new_input),
                    request.max_new_tokens,
                    self._model.vocab_size,
                    kept,
                ),
                new_input=each.new_input,
                sent_under=version if streamed else 0,
                prefix_of=version if self._keeps_prefixes else 0,
                trusts=self._serving.updates.trust_from_now_on(),
                adapter=_labels_at(place),
            )
            for engine_rid, each in zip(request.engine_rids(rid), request.inputs, strict=True)
        ]
        return Try(rid, place, streamed, anyio.current_time(), self.running.interruption_mark(), version)

    async def _settle(
        self,
        request: GenerateRequest,
        sample: str,
        this: Try,
        failures: Failures,
        end: End,
        error: EngineError | None,
        *,
        died: bool,
    ) -> Outcome | None:
        """Judge the end of a try; return the outcome for its samples, None if the same request is to be sent again.

        Raises:
            RequestRefused: the request is invalid, or the likely cause of failures.
            EnginesUnwilling: engines answer no request.
        """
        if error is not None and end is End.OUTDATED:
            log.info("request_outdated", rid=this.rid, tries=failures.tries, reason=str(error))
        elif error is not None and end is not End.REFUSED:
            log.warning("request_lost", rid=this.rid, tries=failures.tries, error=str(error))
            for reader in request.readers:
                await self._drop_unusable(reader, request.min_version)
        died = died or not self._serving.serves
        verdict = judge(
            end,
            streamed=this.streamed,
            had_tokens=all(reader.num_tokens for reader in request.readers),
            asked=self._asked(request, this),
            engine_died=died,
            isolation=self._isolation(sample, this.place),
        )
        if verdict.outcome is Outcome.REFUSE:
            raise error if isinstance(error, RequestRefused) else self._poison(sample)
        for reader in request.readers if not verdict.keeps_tokens else ():
            reader.discard()
        if error is None or verdict.outcome is Outcome.ABORTED:
            return verdict.outcome
        if end is End.OUTDATED and await self._note_newer(failures, error.label):
            return None
        if verdict.is_failure:
            await self._note_failure(sample, this.place, failures, error)
        elif died:
            failures.lost = 0
            self._failed.pop(sample, None)
        await anyio.sleep(RESEND.pause_s(failures.lost))
        return verdict.outcome if verdict.keeps_tokens else None

    def _asked(self, request: GenerateRequest, this: Try) -> Asked:
        if self.running.halted(request.round):
            return Asked.HALT
        interrupted = request.round is not None and self.running.interrupted_since(this.mark)
        return Asked.UPDATE if interrupted else Asked.NO

    def _isolation(self, sample: str, place: Destination) -> Isolation:
        if self._records.get(sample, DeathRecord()).status is RequestStatus.POISON:
            return Isolation.POISON
        return Isolation.YES if place.alone else Isolation.NO

    def _poison(self, sample: str) -> RequestRefused:
        num_alone = self._records[sample].alone
        return RequestRefused(f"it crashes engines: {num_alone} crashed while it was their only request")

    async def _drop_unusable(self, reader: AnswerReader, min_version: int) -> None:
        """Drop the tokens of a lost try that may not be used: of unverified weights, or of too old ones."""
        await self._serving.updates.settled(reader.labels)
        reader.drop_untrusted(self._serving.updates.is_verified)
        if not reader.is_recent(min_version):
            reader.discard()

    async def _note_newer(self, failures: Failures, label: str) -> bool:
        """Have the next try wait for the weights that sampled the first token: they are known here a bit later.

        Returns:
            Whether these weights are verified.
        """
        is_verified = await self._serving.updates.settled({label})
        if is_verified:
            failures.min_version = max(failures.min_version, version_of(label))
        return is_verified

    async def _note_failure(self, sample: str, place: Destination, failures: Failures, error: EngineError) -> None:
        """Record a failure of a running engine and report it. Give the request up after too many.

        Raises:
            RequestRefused: the request is the likely cause: engines answer others.
            EnginesUnwilling: engines answer no request.
        """
        counts, now, group = not isinstance(error, EngineBusy), anyio.current_time(), group_of(sample)
        failures.lost += 1
        failures.failures += counts
        failures.since = min(failures.since, now)
        engine = place.engine or self._serving.engine_behind(error.label)
        self._failed[sample] = engine.name if engine is not None else ""
        who = f"{engine.name} ({engine.url})" if engine is not None else self._serving.admitted_names()
        problem = error.problem if isinstance(error, BadAnswer) else str(error)
        reason = problem.removeprefix(f"{place.url}/generate: ")
        self._serving.events.failed(who, type(error).__name__, reason)
        if engine is not None:
            await self._serving.note_failure(engine, group, reason, counts=counts)
        outcomes = self._serving.outcomes
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

    async def _wait_ready(self, min_version: int, halted: Callable[[], bool]) -> bool:
        """Wait for an engine that accepts requests; return False if the round was halted first.

        Raises:
            EnginesUnwilling: there is none for too long, and the run cannot restart any.
        """
        while True:
            with anyio.move_on_after(self._give_up_after_s):
                return await self._serving.wait_ready(min_version, unless=halted)
            refused = self._serving.refused_by()
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

        min_version = max(request.min_version, failures.min_version)
        record = self._records.get(sample, DeathRecord())
        match record.status:
            case RequestStatus.POISON:
                raise self._poison(sample)
            case RequestStatus.QUARANTINED:
                async with self._isolation_runs.alone(min_version, halted) as engine:
                    with nullcontext() if engine is None else engine.carrying(len(request.inputs)) as adapter:
                        alone = None if engine is None else Destination(engine.url, engine, alone=True, adapter=adapter)
                        yield alone
            case RequestStatus.ORDINARY:
                if not await self._wait_ready(min_version, halted):
                    yield None
                    return
                engine = self._serving.choose(
                    min_version,
                    group_of(sample),
                    failed=self._failed.get(sample),
                    by_name=request.params.return_sampling_mask,
                )
                if engine is None:
                    yield Destination(self._serving.router)
                    return
                # from the choice on: others are chosen in the same moment
                with engine.carrying(len(request.inputs)) as adapter:
                    yield Destination(engine.url, engine, adapter=adapter)

    async def _note_death(self, sample: str, request: GenerateRequest, this: Try) -> bool:
        """Determine whether a request was lost by an engine crash, and record that."""
        record, place = self._records.get(sample, DeathRecord()), this.place
        if place.engine is not None and place.alone:
            crash_cause = await place.engine.crash_cause()
            if crash_cause is None:
                return False
            log.warning("engine_died_of", sample=sample, reason=crash_cause.reason, killed=crash_cause.killed)
            record = record.after_death(alone=True, killed=crash_cause.killed)
        else:
            await self._serving.report_unavailable()
            label = request.readers[0].last_label if this.streamed else ""
            engine = self._serving.holder("" if place.engine is None else place.engine.name, label)
            if not self._serving.crashes.any_since(this.sent_at, engine):
                return False
            record = record.after_death(alone=False, killed=False)
        self._records[sample] = record
        return True

    async def _ask(self, request: GenerateRequest, this: Try) -> End:
        """Send a request and read its answer.

        Raises:
            EngineUnavailable: the request was lost, or its answer may not be used.
            RequestRefused: the request is invalid.
        """
        place, readers = this.place, request.readers
        body = self._body(request, this)
        routing_key = sample_of(request.rid) if place.engine is None else ""
        with self.running.entered(this.rid, request, readers[0] if this.streamed else None) as sent:
            if place.engine is not None:
                sent.engine = place.engine.name
            sent.adapter = "" if place.adapter is None else place.adapter.name
            try:
                if this.streamed:
                    await self._stream(place.url, body, readers[0], routing_key, request.begun)
                else:
                    await self._client.generate(place.url, body, readers, routing_key=routing_key)
            except BadAnswer as error:
                engine = place.engine or self._serving.engine_behind(error.label)
                if engine is None:
                    raise
                raise BadAnswer(f"{engine.name} ({engine.url})", error.problem, error.label) from error
        if sent.given_up:
            who = sent.engine or "the engine that may hold it"
            label = readers[0].last_label if this.streamed else ""
            raise EngineUnavailable(f"{who} {sent.lost or 'generates no token'}", label=label)
        await self._check_labels(request, sent.sent_at)
        aborted = self._aborted(request)
        if aborted and not all(reader.num_tokens for reader in aborted) and self._asked(request, this) is Asked.NO:
            label = next((reader.last_label for reader in readers if reader.num_tokens), "")
            raise AbortedUnasked("it aborted a request without a call to abort it", label=label)
        for label in self._labels_of(request):
            await self._serving.note_answer(label)
        return End.ABORTED if aborted else End.FINISHED

    async def _stream(
        self,
        url: str,
        body: dict[str, Any],
        reader: AnswerReader,
        routing_key: str,
        begun: Callable[[], None] | None,
    ) -> None:
        try:
            await self._client.stream(url, body, reader, routing_key=routing_key, begun=begun)
        except EngineUnavailable:
            if not reader.ended or reader.refused is not None:  # otherwise only the end of the connection is missing
                raise

    async def _check_labels(self, request: GenerateRequest, sent_at: float) -> None:
        """Check which weights sampled the tokens of an answer.

        Raises:
            TokensUnverified: some were not verified.
            EngineFailed: some are older than the request allows.
        """
        labels, tracker = self._labels_of(request), self._serving.updates
        for label in labels:
            self._serving.note_token(label, sent_at)
        if not all(map(tracker.is_verified, labels)) and not await tracker.settled(labels):
            raise TokensUnverified(f"sampled by unverified weights: {', '.join(sorted(labels))}")
        if not all(reader.is_recent(request.min_version) for reader in request.readers):
            raise EngineFailed(f"sampled by weights older than the required version {request.min_version}")

    def _labels_of(self, request: GenerateRequest) -> set[str]:
        return {label for reader in request.readers for label in reader.labels}

    def _aborted(self, request: GenerateRequest) -> Sequence[AnswerReader]:
        """Return the answers that were aborted before their end; those that had reached it become complete."""
        aborted: list[AnswerReader] = []
        for reader in request.readers:
            if reader.status is not SampleStatus.ABORTED:
                continue
            matched = self._model.end_in(reader.ids, request.params)
            if matched is None:
                aborted.append(reader)
            else:
                reader.end_at(matched)
        return aborted

    def _version_at(self, place: Destination) -> int:
        """Return the weight version of the engine that gets a request, or the oldest one that may."""
        if place.adapter is not None:
            return place.adapter.version
        return self._serving.version if place.engine is None else place.engine.version

    def _body(self, request: GenerateRequest, this: Try) -> dict[str, Any]:
        return generate_body(
            this.rid,
            [each.ids() for each in request.inputs],
            request.params,
            max_new_tokens=request.max_new_tokens,
            seeds=[each.seed for each in request.inputs],
            version=this.version,
            adapter="" if this.place.adapter is None else this.place.adapter.name,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Refuse requests that could crash a server, and with it all other requests."""
        try:
            for ids in {
                id(ids): ids for ids in map(SampleInput.ids, request.inputs)
            }.values():  # a batch has one prompt
                self._model.check_ids(ids)
            self._model.check_stop(request.params.stop)
        except ValueError as error:
            raise RequestRefused(f"not sent: {error}") from error


def _labels_at(place: Destination) -> AdapterLabels | None:
    if place.adapter is None or place.engine is None or place.engine.adapters is None:
        return None
    return AdapterLabels(place.engine.adapters.base_label, place.adapter.label)


def sample_of(rid: str) -> str:
    """Return the common prefix of a sample's request ids, which are LEASE-INDEX-NUMBER."""
    return rid.rpartition("-")[0] or rid


def group_of(sample: str) -> str:
    """Return the lease of a sample, which is LEASE-INDEX: the samples of a prompt group share it."""
    return sample.rpartition("-")[0]
