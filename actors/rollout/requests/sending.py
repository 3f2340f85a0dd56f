"""Requests to the engines: sent to confirmed ones, and sent again when lost."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import structlog

from actors.rollout.engines.engine import Engine
from actors.rollout.engines.fleet import Fleet
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.poison import DeathRecord, Standing
from actors.rollout.requests.request import Generated, GenerateRequest
from actors.rollout.requests.served_model import ServedModel
from actors.rollout.requests.trials import Trials
from actors.rollout.sglang.answers import NOTHING, Answer, is_aborted, labels_of, oldest_version
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient, asked_of
from actors.rollout.sglang.errors import BadAnswer, EngineFailed, EngineUnavailable, RequestRefused, TokensUnproven
from actors.rollout.sglang.streams import Stream
from runtime.retrying import Backoff

log = structlog.get_logger()

RESEND = Backoff(first_s=0.5, max_s=8.0)  # before a lost request is sent again, by the failures of engines on it
MAX_FAILURES = 10  # of engines on one request, before it is taken for the cause
STREAM_ABOVE = 256  # tokens that a request may get: a shorter one costs less to repeat than to stream


class Destination(NamedTuple):
    """Where a request is sent."""

    url: str  # the router's, or an engine's
    alone_at: Engine | None  # that has nothing else of ours


class Generator:
    """Generates through the router; `running` knows what is under way, so that a halt can reach it."""

    def __init__(self, client: SglangClient, fleet: Fleet, model: ServedModel) -> None:
        self._client = client
        self._fleet = fleet
        self._model = model
        self.running = RunningRequests(client, fleet)
        self._trials = Trials(fleet, self.running)
        self._records: dict[str, DeathRecord] = {}  # by sample, of those whose engines died

    async def generate(
        self, request: GenerateRequest, show: Callable[[Stream], None] | None = None
    ) -> Generated | None:
        """Wait for an engine that may answer, ask it, and ask again if the request is lost.

        It is asked again for as long as engines or the router are away, which is their agent's to end; but not for ever
        when they answer and fail. A long request is streamed; if it is lost, what came of it is the answer.

        Args:
            request: what is asked.
            show: told of the stream, whenever one begins; none: nobody looks, nothing is streamed.

        Returns:
            None when the round was halted before an engine was asked.

        Raises:
            RequestRefused: the request is wrong, by what the model allows or as the engine says, or engines failed on
                it too often or die of it (poison.py).
        """
        self._check(request)
        sample, generated = sample_of(request.rid), None
        try:
            generated = await self._generate(request, sample, show)
        finally:
            if generated is None or not generated.cut_short:  # else it comes again, for the rest
                self._records.pop(sample, None)
        return generated

    async def _generate(
        self, request: GenerateRequest, sample: str, show: Callable[[Stream], None] | None
    ) -> Generated | None:
        tries = failures = 0
        while True:
            async with self._place(request, sample) as place:
                if place is None:
                    return None
                if await self.running.wait_for_sweep():
                    continue
                rid = f"{request.rid}-{tries}"
                tries += 1
                stream = self._stream_for(rid, request, show)
                sent_at = anyio.current_time()
                try:
                    return await self._ask(rid, request, stream, place)
                except EngineUnavailable as error:
                    log.warning("request_lost", rid=rid, tries=tries, error=str(error))
                    if not await self._note_death(sample, place, stream, sent_at):
                        failures += isinstance(error, EngineFailed)
                    if failures >= MAX_FAILURES:
                        raise RequestRefused(f"{failures} times in vain, at last: {error}") from error
            await anyio.sleep(RESEND.pause_s(failures))
            if stream is not None and (kept := await self._kept(stream, request.min_version)) is not None:
                return Generated([kept], cut_short=True)

    @asynccontextmanager
    async def _place(self, request: GenerateRequest, sample: str) -> AsyncGenerator[Destination | None]:
        """Where to send a request, once that may be; None: its round was halted before.

        Raises:
            RequestRefused: engines die of it.
        """

        def halted() -> bool:
            return self.running.halted(request.round)

        record = self._records.get(sample, DeathRecord())
        match record.standing:
            case Standing.POISON:
                raise RequestRefused(f"engines die of it: {record.alone} that had nothing else to do")
            case Standing.SUSPECT:
                async with self._trials.alone(request.min_version, halted) as engine:
                    yield None if engine is None else Destination(engine.url, engine)
            case Standing.ORDINARY:
                ready = await self._fleet.wait_ready(request.min_version, unless=halted)
                yield Destination(self._fleet.router, None) if ready else None

    async def _note_death(self, sample: str, place: Destination, stream: Stream | None, sent_at: float) -> bool:
        """Find out whether a request was lost with its engine, and remember that."""
        record = self._records.get(sample, DeathRecord())
        if place.alone_at is not None:
            autopsy = await self._fleet.autopsy(place.alone_at)
            if autopsy is None:
                return False
            log.warning("engine_died_of", sample=sample, reason=autopsy.reason, killed=autopsy.killed)
            record = record.after_death(alone=True, killed=autopsy.killed)
        else:
            await self._fleet.report_unavailable()
            engine = "" if stream is None else self._fleet.loads.engine_of(stream.last_label)
            if not self._fleet.deaths.any_since(sent_at, engine):
                return False
            record = record.after_death(alone=False, killed=False)
        self._records[sample] = record
        return True

    def _stream_for(self, rid: str, request: GenerateRequest, show: Callable[[Stream], None] | None) -> Stream | None:
        if show is None or request.max_new_tokens <= STREAM_ABOVE:
            return None
        (asked,) = asked_of(self._body(request, rid), self._model.vocab_size)
        stream = Stream(self._fleet.version, self._fleet.loads.trust_from_now_on(), asked)
        show(stream)
        return stream

    async def _kept(self, stream: Stream, min_version: int) -> Answer | None:
        """What a lost request leaves to go on from; None: nothing, so that it may be sent again as it was."""
        await self._fleet.loads.settled(stream.labels)
        stream.drop_untrusted(self._fleet.loads.is_proven)
        rest = stream.rest()
        if not is_recent(rest, min_version):
            rest = NOTHING
        return rest if rest.output_ids or stream.num_taken else None

    async def _ask(self, rid: str, request: GenerateRequest, stream: Stream | None, place: Destination) -> Generated:
        mark = self.running.interruption_mark()
        answers: list[Answer] = []
        with self.running.entered(rid, request, stream) as sent:
            if place.alone_at is not None:
                sent.engine = place.alone_at.name
            try:
                if stream is not None:
                    answers = [await self._stream(rid, request, stream, place)]
                else:
                    answers = await self._client.generate(place.url, self._body(request, rid), self._model.vocab_size)
                    answers = [self._model.ended(answer, answer.output_ids, request.params) for answer in answers]
            except BadAnswer as error:
                engine = place.alone_at or self._fleet.engine_of(error.label)
                if engine is None:
                    raise
                raise BadAnswer(f"{engine.name} ({engine.url})", error.problem, error.label) from error
        if sent.given_up:
            raise EngineUnavailable(f"{sent.engine or 'the engine that may have it'} makes no token")
        labels = stream.labels if stream is not None else [label for answer in answers for label in labels_of(answer)]
        for label in labels:
            self._fleet.note_token(label)
        if not await self._fleet.loads.settled(set(labels)):
            raise TokensUnproven(f"sampled by weights that were not proven: {', '.join(sorted(set(labels)))}")
        if not all(is_recent(answer, request.min_version) for answer in answers):
            raise EngineFailed(f"sampled by weights older than {request.min_version}, which it was asked of")
        interrupted = (
            request.round is not None
            and self.running.interrupted_since(mark)
            and not self.running.halted(request.round)
        )
        return Generated(answers, cut_short=interrupted and any(is_aborted(answer) for answer in answers))

    async def _stream(self, rid: str, request: GenerateRequest, stream: Stream, place: Destination) -> Answer:
        try:
            await self._client.stream(place.url, self._body(request, rid), stream)
        except EngineUnavailable:
            if not stream.ended:  # else nothing is missing but the end of the connection
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
        """Send nothing that a server might die of, with everybody's requests."""
        try:
            for ids in request.input_ids:
                self._model.check_ids(ids)
            self._model.check_stop(request.params.stop)
        except ValueError as error:
            raise RequestRefused(f"not sent: {error}") from error


def sample_of(rid: str) -> str:
    """What all requests of a sample have in common: their ids are LEASE-INDEX-NUMBER."""
    return rid.rpartition("-")[0] or rid


def is_recent(answer: Answer, min_version: int) -> bool:
    """Whether no token of it was sampled by weights older than that."""
    oldest = oldest_version(answer)
    return oldest is None or oldest >= min_version
