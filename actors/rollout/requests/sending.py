"""Requests to the engines: sent to confirmed ones, and sent again when lost."""

from collections.abc import Callable
from typing import Any

import anyio
import structlog

from actors.rollout.engines.fleet import Fleet
from actors.rollout.requests.interrupting import RunningRequests
from actors.rollout.requests.request import Generated, GenerateRequest
from actors.rollout.requests.served_model import ServedModel
from actors.rollout.sglang.answers import NOTHING, Answer, is_aborted, labels_of, oldest_version
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineFailed, EngineUnavailable, RequestRefused, TokensUnproven
from actors.rollout.sglang.streams import Stream
from runtime.retrying import Backoff

log = structlog.get_logger()

RESEND = Backoff(first_s=0.5, max_s=8.0)  # before a lost request is sent again, by the failures of engines on it
MAX_FAILURES = 10  # of engines on one request, before it is taken for the cause
STREAM_ABOVE = 256  # tokens that a request may get: a shorter one costs less to repeat than to stream


class Generator:
    """Generates through the router; `running` knows what is under way, so that a halt can reach it."""

    def __init__(self, client: SglangClient, fleet: Fleet, model: ServedModel) -> None:
        self._client = client
        self._fleet = fleet
        self._model = model
        self.running = RunningRequests(client, fleet)

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
                it too often.
        """
        self._check(request)
        tries = failures = 0
        while await self._fleet.wait_ready(request.min_version, unless=lambda: self.running.halted(request.round)):
            if await self.running.wait_for_sweep():
                continue
            rid = f"{request.rid}-{tries}"
            tries += 1
            stream = None
            if show is not None and request.max_new_tokens > STREAM_ABOVE:
                stream = Stream(self._fleet.version, self._fleet.loads.trust_from_now_on())
                show(stream)
            try:
                return await self._ask(rid, request, stream)
            except EngineUnavailable as error:
                failures += isinstance(error, EngineFailed)
                log.warning("request_lost", rid=rid, tries=tries, error=str(error))
                if failures >= MAX_FAILURES:
                    raise RequestRefused(f"{failures} times in vain, at last: {error}") from error
            await self._fleet.report_unavailable()
            await anyio.sleep(RESEND.pause_s(failures))
            if stream is not None and (kept := await self._kept(stream, request.min_version)) is not None:
                return Generated([kept], cut_short=True)
        return None

    async def _kept(self, stream: Stream, min_version: int) -> Answer | None:
        """What a lost request leaves to go on from; None: nothing, so that it may be sent again as it was."""
        await self._fleet.loads.settled(stream.labels)
        stream.drop_untrusted(self._fleet.loads.is_proven)
        rest = stream.rest()
        if not is_recent(rest, min_version):
            rest = NOTHING
        return rest if rest.output_ids or stream.num_taken else None

    async def _ask(self, rid: str, request: GenerateRequest, stream: Stream | None) -> Generated:
        mark = self.running.interruption_mark()
        answers: list[Answer] = []
        with self.running.entered(rid, request, stream) as sent:
            if stream is not None:
                answers = [await self._stream(rid, request, stream)]
            else:
                answers = await self._client.generate(self._fleet.router, self._body(request, rid))
                answers = [self._model.ended(answer, answer.output_ids, request.params) for answer in answers]
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

    async def _stream(self, rid: str, request: GenerateRequest, stream: Stream) -> Answer:
        try:
            await self._client.stream(self._fleet.router, self._body(request, rid), stream)
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


def is_recent(answer: Answer, min_version: int) -> bool:
    """Whether no token of it was sampled by weights older than that."""
    oldest = oldest_version(answer)
    return oldest is None or oldest >= min_version
