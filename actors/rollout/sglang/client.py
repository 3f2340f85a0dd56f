"""SGLang's HTTP API as a rollout actor uses it: engines directly, generation through the router."""

import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import aiohttp
import msgspec

from actors.rollout.sglang.answers import Answer
from actors.rollout.sglang.body import probe_body
from actors.rollout.sglang.checks import Asked, answer_problem, label_in
from actors.rollout.sglang.errors import (
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineSilent,
    EngineUnavailable,
    RequestRefused,
)
from actors.rollout.sglang.events import DONE, EventTooLarge, events_of
from actors.rollout.sglang.streams import Stream, refusal_in
from runtime.secrets import Secret

T = TypeVar("T")

BEYOND_ROUTER_S = 10.0  # that we wait longer for an answer than the router does: it says why there is none
ADMIN_TIMEOUT_S = 10.0
PROBE_TRIES = 5
SILENT_TRIES = 2  # of a look at an engine: one answer that comes late does not make it another one
MAX_ANSWER_BYTES = 1 << 29  # SGLang writes about 40 bytes for a token
REFUSALS = (400, 413, 422)
PASSING = (408, 425, 429, 502, 503, 504)


class RankChecksums(msgspec.Struct, frozen=True):
    """What one rank of an engine holds: a hash of each tensor, by the engine's own name."""

    checksums: dict[str, str] = {}


class ChecksumAnswer(msgspec.Struct, frozen=True):
    """Answer of /weights_checker."""

    success: bool
    per_engine_checksum: str | None = None
    ranks: tuple[RankChecksums, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of /model_info that is used."""

    weight_version: str | None = None


class ProbeMeta(msgspec.Struct, frozen=True):
    """The part of the meta_info of an answer to a probe that is used."""

    finish_reason: dict[str, Any] | None = None
    input_token_logprobs: list[tuple[float | None, int, str | None]] = []


class ProbeAnswer(msgspec.Struct, frozen=True):
    """Answer of /generate to a probe."""

    meta_info: ProbeMeta


class StreamedError(msgspec.Struct, frozen=True):
    """What is wrong, in the stream of a request that was answered with 200 before anything was looked at."""

    message: str = ""
    code: int | None = None


class ErrorEvent(msgspec.Struct, frozen=True):
    """An event of a stream that holds no tokens."""

    error: StreamedError


class Load(msgspec.Struct, frozen=True):
    """The part of what a scheduler has to do that is used; it changes with every token."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0


class LoadsAnswer(msgspec.Struct, frozen=True):
    """Answer of /v1/loads."""

    loads: tuple[Load, ...] = ()


class RouterWorker(msgspec.Struct, frozen=True):
    """An engine as the router lists it."""

    id: str
    url: str
    is_healthy: bool = False


class WorkerList(msgspec.Struct, frozen=True):
    """Answer of the router's GET /workers."""

    workers: list[RouterWorker] = []


class SglangClient:
    """One connection pool for all engines and the router of a rollout actor."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        key: Secret | None = None,
        strangers: Collection[str] = (),
        *,
        update_timeout_s: float = 600.0,
        generate_timeout_s: float = 14_400.0,
    ) -> None:
        """Talk over a session.

        Args:
            session: of all requests.
            key: what the run's engines and its router ask for.
            strangers: URLs of engines that are not the run's; they are not shown the key.
            update_timeout_s: of loading weights, and of computing their checksum.
            generate_timeout_s: of the longest answer, at the router.
        """
        self._update_timeout_s = update_timeout_s
        self._session = session
        self._generate_timeout_s = generate_timeout_s + BEYOND_ROUTER_S
        self._key = key
        self._strangers = tuple(strangers)
        self._plain = {"Content-Type": "application/json"}
        self._with_key = self._plain if key is None else self._plain | {"Authorization": f"Bearer {key.reveal()}"}

    async def generate(self, router: str, body: dict[str, Any], vocab_size: int | None = None) -> list[Answer]:
        """Send a request, one sample or a batch of them, and wait for its end.

        Args:
            router: or an engine.
            body: of the request.
            vocab_size: of the model; none: not known.

        Raises:
            EngineUnavailable: connection lost, no worker.
            EngineFailed: server error; BadAnswer: an answer that cannot be read, or cannot be true.
            RequestRefused: the request is wrong.
        """
        url = router + "/generate"
        data = await self._post(url, body, self._generate_timeout_s)
        all_asked = asked_of(body, vocab_size)
        try:
            answers = [_read(data, Answer)] if len(all_asked) == 1 else _read(data, list[Answer])
        except ValueError as error:
            raise BadAnswer(url, f"unreadable answer: {error}: {_shown(data)}", label_in(data)) from error
        if len(answers) != len(all_asked):
            raise BadAnswer(url, f"{len(answers)} answers to {len(all_asked)} prompts", label_in(data))
        for asked, answer in zip(all_asked, answers, strict=True):
            if (refused := refusal_in(answer.meta_info)) is not None:
                raise _error(url, refused.code, refused.message, label=answer.meta_info.weight_version or "")
            if (problem := answer_problem(answer, asked)) is not None:
                raise BadAnswer(url, problem, answer.meta_info.weight_version or "")
        return answers

    async def stream(self, router: str, body: dict[str, Any], stream: Stream) -> None:
        """Send a request for one sample and take in what comes of it, to its end. What came stays when that fails.

        Raises:
            EngineUnavailable: connection lost, also on the way; no worker.
            EngineFailed: server error; BadAnswer: a chunk that cannot be read, or cannot be true.
            RequestRefused: the request is wrong.
        """
        url = router + "/generate"
        data = msgspec.json.encode({**body, "stream": True})
        async with self._request("POST", url, data, self._generate_timeout_s) as response:
            try:
                async for event in events_of(response.content):
                    if event == DONE:
                        break
                    _raise_streamed(url, event)
                    _add(url, stream, event)
            except EventTooLarge as error:
                raise BadAnswer(url, str(error), stream.last_label) from error
        if not stream.ended:
            raise EngineUnavailable(f"{url}: the stream broke off after {stream.num_tokens} tokens")
        if stream.refused is not None:
            raise _error(url, stream.refused.code, stream.refused.message, label=stream.last_label)

    async def ready(self, engine: str) -> bool:
        """Whether an engine answers its readiness probe, the second one if the first is not answered in time."""
        try:
            await self._look(engine + "/ready")
        except EngineError:
            return False
        return True

    async def is_paused(self, engine: str) -> bool:
        """Whether an engine answers that it does not generate now; not when it does not answer at all."""
        try:
            await self._send("GET", engine + "/ready", None, ADMIN_TIMEOUT_S)
        except EngineBusy:
            return True
        except EngineError:
            return False
        return False

    async def loads(self, engine: str) -> tuple[Load, ...] | None:
        """What an engine says that it has to do; None: it does not answer.

        SGLang says what its scheduler last wrote down: that of a scheduler that stands still stays as it was.
        """
        url = engine + "/v1/loads"
        try:
            return _decode(url, await self._send("GET", url, None, ADMIN_TIMEOUT_S), LoadsAnswer).loads
        except EngineError:
            return None

    async def weight_version(self, engine: str) -> str | None:
        """What an engine calls its weights."""
        url = engine + "/model_info"
        return _decode(url, await self._look(url), ModelInfo).weight_version

    async def pause(self, engine: str, mode: str) -> None:
        """Stop an engine from generating; what it has is put back or frozen, as the mode says."""
        await self._post(engine + "/pause_generation", {"mode": mode}, ADMIN_TIMEOUT_S)

    async def proceed(self, engine: str) -> None:
        """End a pause, if there is one."""
        await self._post(engine + "/continue_generation", {}, ADMIN_TIMEOUT_S)

    async def server_info(self, engine: str) -> dict[str, Any]:
        """What an engine says of itself: arguments, version, layout."""
        url = engine + "/server_info"
        return _decode(url, await self._send("GET", url, None, ADMIN_TIMEOUT_S), dict[str, Any])

    async def model_info(self, engine: str) -> dict[str, Any]:
        """What an engine says of its model."""
        url = engine + "/model_info"
        return _decode(url, await self._send("GET", url, None, ADMIN_TIMEOUT_S), dict[str, Any])

    async def update_weights(self, engine: str, path: str, label: str, *, flush_cache: bool = True) -> None:
        """Load weights from a directory. The engine waits for its running requests unless it is paused."""
        body = {
            "model_path": path,
            "weight_version": label,
            "flush_cache": flush_cache,
            "load_format": "auto",  # one that was started with drawn weights would go on drawing
        }
        await self._post(engine + "/update_weights_from_disk", body, self._update_timeout_s)

    async def update_version(self, engine: str, label: str) -> None:
        """Have an engine call its weights something else, from the next token on."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._post(engine + "/update_weight_version", body, ADMIN_TIMEOUT_S)

    async def checksum(self, engine: str) -> str | None:
        """Checksum of the weights that an engine holds."""
        return (await self.checksums(engine)).per_engine_checksum

    async def checksums(self, engine: str) -> ChecksumAnswer:
        """The same, with the hashes of its tensors on each of its ranks."""
        url = engine + "/weights_checker"
        return _decode(url, await self._post(url, {"action": "checksum"}, self._update_timeout_s), ChecksumAnswer)

    async def prompt_log_probs(self, engine: str, token_ids: Sequence[int]) -> list[float | None]:
        """Log-probs of a prompt's tokens at temperature 1, the first of them none. Computed anew, whatever is cached.

        Raises:
            EngineUnavailable: others aborted the request each time, as an abort of everything does.
        """
        url = engine + "/generate"
        for _ in range(PROBE_TRIES):
            data = await self._post(url, probe_body(uuid.uuid4().hex, token_ids), self._update_timeout_s)
            meta = _decode(url, data, ProbeAnswer).meta_info
            if (meta.finish_reason or {}).get("type") != "abort":
                right = [token for _, token, _ in meta.input_token_logprobs] == list(token_ids)
                return [log_prob for log_prob, _, _ in meta.input_token_logprobs] if right else []
        raise EngineUnavailable(f"{url}: the probe of its weights was aborted {PROBE_TRIES} times")

    async def abort(self, engine: str, rid: str | None) -> None:
        """Abort one request, or all of an engine when rid is None. Unknown requests are ignored."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post(engine + "/abort_request", body, ADMIN_TIMEOUT_S)

    async def flush_cache(self, engine: str, within_s: float) -> None:
        """Have an engine empty its cache once it is idle.

        Raises:
            RequestRefused: it is not, within that time.
        """
        await self._post(f"{engine}/flush_cache?timeout={within_s:g}", {}, within_s + ADMIN_TIMEOUT_S)

    async def release_memory(self, engine: str, tags: Sequence[str]) -> None:
        """Have an idle engine give memory back; memory.py keeps the order."""
        await self._post(engine + "/release_memory_occupation", {"tags": tags}, self._update_timeout_s)

    async def resume_memory(self, engine: str, tags: Sequence[str]) -> None:
        """Have an engine take memory again."""
        await self._post(engine + "/resume_memory_occupation", {"tags": tags}, self._update_timeout_s)

    async def workers(self, router: str) -> list[RouterWorker]:
        """The engines that the router knows."""
        url = router + "/workers"
        return _decode(url, await self._send("GET", url, None, ADMIN_TIMEOUT_S), WorkerList).workers

    async def add_worker(self, router: str, engine: str) -> None:
        """Ask the router to take an engine in; it does so in the background."""
        body = {"url": engine}
        if self._key is not None and not engine.startswith(self._strangers):
            body["api_key"] = self._key.reveal()
        await self._post(router + "/workers", body, ADMIN_TIMEOUT_S)

    async def remove_worker(self, router: str, worker: RouterWorker) -> None:
        """Ask the router to forget an engine."""
        await self._send("DELETE", f"{router}/workers/{worker.id}", None, ADMIN_TIMEOUT_S)

    async def order(self, url: str, body: dict[str, Any], timeout_s: float) -> None:
        """Have an engine do something that has no answer but that it is done; what updates.py is made of."""
        await self._post(url, body, timeout_s)

    async def _post(self, url: str, body: dict[str, Any], timeout_s: float) -> bytes:
        return await self._send("POST", url, msgspec.json.encode(body), timeout_s)

    async def _look(self, url: str) -> bytes:
        """Ask again what is not answered in time."""
        for _ in range(SILENT_TRIES - 1):
            with suppress(EngineSilent):
                return await self._send("GET", url, None, ADMIN_TIMEOUT_S)
        return await self._send("GET", url, None, ADMIN_TIMEOUT_S)

    async def _send(self, method: str, url: str, data: bytes | None, timeout_s: float) -> bytes:
        async with self._request(method, url, data, timeout_s) as response:
            return await _read_all(url, response)

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, data: bytes | None, timeout_s: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A good answer, to be read in the block."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = self._plain if url.startswith(self._strangers) else self._with_key
        try:
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 300:
                    raise _error(url, response.status, _shown(await _read_all(url, response)))
                yield response
        except TimeoutError as error:  # some are ClientErrors too
            raise EngineSilent(f"{url}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{url}: {error!r}") from error


def _error(url: str, code: int, message: str, *, label: str = "") -> EngineError:
    if code in REFUSALS:
        return RequestRefused(f"{url}: {message}", label=label)
    return (EngineBusy if code in PASSING else EngineFailed)(f"{url}: {code} {message}", label=label)


def _add(url: str, stream: Stream, event: bytes) -> None:
    try:
        stream.add(event)
    except (ValueError, RecursionError) as error:
        label = label_in(event) or stream.last_label
        raise BadAnswer(url, f"bad chunk: {error}: {_shown(event)}", label) from error


async def _read_all(url: str, response: aiohttp.ClientResponse) -> bytes:
    """Raises EngineFailed: it is larger than any answer."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise EngineFailed(f"{url}: an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _raise_streamed(url: str, event: bytes) -> None:
    """Raise what an event says instead of tokens: a server streams an error as it would have answered it."""
    if not event.startswith(b'{"error"'):
        return
    error = _decode(url, event, ErrorEvent).error
    raise _error(url, error.code or 0, error.message)


def _shown(answer: bytes) -> str:
    return answer.decode(errors="replace")[:500]


def asked_of(body: dict[str, Any], vocab_size: int | None = None) -> list[Asked]:
    """What the answers to a request have to fit, one for each of its prompts."""
    rid, prompts, limit = body["rid"], body["input_ids"], body["sampling_params"]["max_new_tokens"]
    if not isinstance(prompts[0], list):
        return [Asked(rid, len(prompts), limit, vocab_size)]
    return [Asked(f"{rid}_{index}", len(prompt), limit, vocab_size) for index, prompt in enumerate(prompts)]


def _decode(url: str, data: bytes, answer_type: type[T]) -> T:
    try:
        return _read(data, answer_type)
    except ValueError as error:
        raise EngineFailed(f"{url}: unreadable answer: {error}") from error


def _read(data: bytes, answer_type: type[T]) -> T:
    """Raises ValueError: it is not of this type; so are msgspec's errors and UnicodeDecodeError."""
    try:
        return msgspec.json.decode(data, type=answer_type)
    except RecursionError:
        raise ValueError("lists and objects inside each other without end") from None
