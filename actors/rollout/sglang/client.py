"""Client for SGLang's HTTP API: control calls to engines, generation through the router."""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiohttp
import msgspec
from anyio import to_thread

from actors.rollout.sglang.answers import PART_BYTES, decode_answer, decode_answers, refusal_in
from actors.rollout.sglang.body import probe_body
from actors.rollout.sglang.checks import label_in
from actors.rollout.sglang.control_answers import (
    RUN_LABEL,
    AdapterAnswer,
    ChecksumAnswer,
    ErrorEvent,
    Load,
    LoadsAnswer,
    ModelInfo,
    ProbeAnswer,
    RouterWorker,
    ServedModels,
    WorkerList,
    decode_control,
)
from actors.rollout.sglang.errors import (
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineSilent,
    EngineUnavailable,
    RequestRefused,
)
from actors.rollout.sglang.events import DONE, MAX_EVENT_BYTES, EventTooLarge, events_of
from actors.rollout.sglang.given import GivenLogProbs, read_given
from actors.rollout.sglang.reading import AnswerReader
from runtime.util.secrets import Secret

ROUTING_KEY: Final = "X-SMG-Routing-Key"  # the router's "manual" policy keeps requests with equal keys on one engine
BEYOND_ROUTER_S = 10.0  # time beyond the router's timeout: the router then reports the reason
ADMIN_TIMEOUT_S = 10.0
PROBE_TRIES = 5
SILENT_TRIES = 2  # tries of a health check: one late response is not a failure
MAX_ANSWER_BYTES = 1 << 29  # SGLang writes about 40 bytes per token
REFUSALS = (400, 413, 422)
PASSING = (408, 425, 429, 502, 503, 504)


class SglangClient:
    """HTTP client for all engines and the router of a rollout actor, with one connection pool."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        key: Secret | None = None,
        strangers: Collection[str] = (),
        *,
        run: str = "",
        stall_s: float = 300.0,
        generate_timeout_s: float = 14_400.0,
        admin_timeout_s: float = ADMIN_TIMEOUT_S,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        """Send all requests through an open HTTP session.

        Args:
            session: for all requests.
            key: API key of the run's engines and router; None: no key.
            strangers: URLs of external engines; they never get the key.
            run: name of the run, a label of its engines at a router.
            stall_s: for calls of a weight update, unless the call names its own limit.
            generate_timeout_s: for the longest answer, at the router.
            admin_timeout_s: for control calls and health checks.
            max_answer_bytes: limit of a response that is not streamed.
            max_event_bytes: limit of an event of a streamed response.
        """
        self._admin_timeout_s = admin_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._max_event_bytes = max_event_bytes
        self._stall_s = stall_s
        self._session = session
        self._generate_timeout_s = generate_timeout_s + BEYOND_ROUTER_S
        self._key = key
        self._run = run
        self._strangers = tuple(strangers)
        self._plain = {"Content-Type": "application/json"}
        self._guard: Callable[[str], Awaitable[None]] | None = None
        self._with_key = self._plain if key is None else self._plain | {"Authorization": f"Bearer {key.reveal()}"}

    def guard_by(self, guard: Callable[[str], Awaitable[None]]) -> None:
        """Set what is called with an engine's URL before each call that changes what the engine does for others."""
        self._guard = guard

    async def generate(
        self, router: str, body: dict[str, Any], readers: Sequence[AnswerReader], *, routing_key: str = ""
    ) -> None:
        """Send a request for one sample or a batch, and read the answers.

        Args:
            router: URL of the router or an engine.
            body: of the request.
            readers: of the answers, in the order of the prompts. On an error some may have read theirs.
            routing_key: of the conversation, for a router.

        Raises:
            EngineUnavailable: connection lost, or no worker.
            EngineFailed: server error; BadAnswer: an unreadable or invalid answer.
            RequestRefused: the request is invalid.
        """
        url = router + "/generate"
        async with self._request(
            "POST", url, msgspec.json.encode(body), self._generate_timeout_s, routing_key
        ) as response:
            data = await _read_all(url, response, self._max_answer_bytes)
        if len(data) <= PART_BYTES:
            _take_answers(url, data, readers)
            return
        for reader in readers:
            reader.is_busy = True
        try:
            await to_thread.run_sync(_take_answers, url, data, readers)
        finally:
            for reader in readers:
                reader.is_busy = False

    async def stream(
        self,
        router: str,
        body: dict[str, Any],
        reader: AnswerReader,
        *,
        routing_key: str = "",
        begun: Callable[[], None] | None = None,
    ) -> None:
        """Send a request for one sample and read its chunks as they come; `generate` describes the arguments.

        On an error the reader keeps its tokens. `begun` is called with each chunk, also the first.

        Raises:
            EngineUnavailable: connection lost, also in the middle of the stream; or no worker.
            EngineFailed: server error; BadAnswer: an unreadable or invalid chunk.
            RequestRefused: the request is invalid.
        """
        url = router + "/generate"
        data = msgspec.json.encode({**body, "stream": True})
        async with self._request("POST", url, data, self._generate_timeout_s, routing_key) as response:
            try:
                async for event in events_of(response.content, self._max_event_bytes):
                    if event == DONE:
                        break
                    _raise_streamed(url, event)
                    _add(url, reader, event)
                    if begun is not None:
                        begun()
            except EventTooLarge as error:
                raise BadAnswer(url, str(error), reader.last_label) from error
        if not reader.ended:
            raise EngineUnavailable(f"{url}: the stream broke off after {reader.num_tokens} tokens")
        if reader.refused is not None:
            raise _error(url, reader.refused.code, reader.refused.message, label=reader.last_label)

    async def ready(self, engine: str) -> bool:
        """Whether an engine answers its readiness check; a timeout is retried once."""
        try:
            await self._look(engine + "/ready")
        except EngineError:
            return False
        return True

    async def is_paused(self, engine: str) -> bool:
        """Whether an engine responds that it is not generating now; False if it does not respond."""
        try:
            await self._send("GET", engine + "/ready", None, self._admin_timeout_s)
        except EngineBusy:
            return True
        except EngineError:
            return False
        return False

    async def loads(self, engine: str) -> tuple[Load, ...] | None:
        """Return an engine's load per scheduler; None if it does not respond, or with impossible numbers.

        SGLang returns the last recorded load, so that of a hung scheduler never changes.
        """
        try:
            return await self.reported_loads(engine)
        except EngineError:
            return None

    async def reported_loads(self, engine: str) -> tuple[Load, ...]:
        """Return an engine's load per scheduler.

        Raises:
            EngineUnavailable: it does not respond.
            EngineFailed: the response is unreadable, or reports impossible numbers.
        """
        url = engine + "/v1/loads"
        return decode_control(url, await self._send("GET", url, None, self._admin_timeout_s), LoadsAnswer).loads

    async def weight_version(self, engine: str) -> str | None:
        """Return an engine's weight label."""
        url = engine + "/model_info"
        return decode_control(url, await self._look(url), ModelInfo).weight_version

    async def pause(self, engine: str, mode: str) -> None:
        """Pause generation; running requests are retracted or kept, depending on the mode."""
        await self._command(engine + "/pause_generation", {"mode": mode}, self._admin_timeout_s)

    async def proceed(self, engine: str) -> None:
        """End a pause, if there is one."""
        await self._command(engine + "/continue_generation", {}, self._admin_timeout_s)

    async def server_info(self, engine: str) -> dict[str, Any]:
        """Return an engine's server info: arguments, version, layout."""
        url = engine + "/server_info"
        return decode_control(url, await self._send("GET", url, None, self._admin_timeout_s), dict[str, Any])

    async def model_info(self, engine: str) -> dict[str, Any]:
        """Return an engine's model info."""
        url = engine + "/model_info"
        return decode_control(url, await self._send("GET", url, None, self._admin_timeout_s), dict[str, Any])

    async def update_weights(
        self, engine: str, path: str, label: str, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load weights from a directory. The engine finishes its running requests first unless it is paused."""
        body = {
            "model_path": path,
            "weight_version": label,
            "flush_cache": flush_cache,
            "load_format": "auto",  # an engine started with random weights would keep using that load format
        }
        await self._command(engine + "/update_weights_from_disk", body, timeout_s or self._stall_s)

    async def update_version(self, engine: str, label: str) -> None:
        """Change an engine's weight label, from the next token on."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._command(engine + "/update_weight_version", body, self._admin_timeout_s)

    async def checksum(self, engine: str, timeout_s: float | None = None) -> str | None:
        """Return the checksum of an engine's weights."""
        return (await self.checksums(engine, timeout_s)).per_engine_checksum

    async def checksums(self, engine: str, timeout_s: float | None = None) -> ChecksumAnswer:
        """Return the checksums of an engine's weights, also of each tensor."""
        url = engine + "/weights_checker"
        answer = await self._post(url, {"action": "checksum"}, timeout_s or self._stall_s)
        return decode_control(url, answer, ChecksumAnswer)

    async def load_adapter(self, engine: str, name: str, path: str, timeout_s: float) -> AdapterAnswer:
        """Load a LoRA adapter from a directory, under a name that is not loaded. Generation goes on meanwhile.

        Raises:
            RequestRefused: the engine cannot load it, or the name is loaded.
        """
        url = engine + "/load_lora_adapter"
        answer = await self._guarded_post(url, {"lora_name": name, "lora_path": path}, timeout_s)
        return decode_control(url, answer, AdapterAnswer)

    async def unload_adapter(self, engine: str, name: str, timeout_s: float) -> None:
        """Unload a LoRA adapter. The engine answers once its requests have ended, and loads wait for that too."""
        await self._command(engine + "/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def adapters(self, engine: str) -> dict[str, str]:
        """Return the names of the LoRA adapters that an engine has loaded, with the directories they are from."""
        url = engine + "/v1/models"
        models = decode_control(url, await self._look(url), ServedModels).data
        return {model.id: model.root for model in models if model.parent}

    async def prompt_log_probs(self, engine: str, token_ids: Sequence[int], adapter: str = "") -> list[float | None]:
        """Return the log-probs of a prompt's tokens at temperature 1, recomputed without the cache.

        The first entry is None. The list is empty if the response is for other tokens.

        Args:
            engine: URL of the engine.
            token_ids: of the prompt.
            adapter: name of a loaded adapter; empty: the base model.

        Raises:
            EngineUnavailable: the request was aborted each time, e.g. by an abort-all of another client.
        """
        url = engine + "/generate"
        for _ in range(PROBE_TRIES):
            data = await self._post(url, probe_body(uuid.uuid4().hex, token_ids, adapter=adapter), self._stall_s)
            meta = decode_control(url, data, ProbeAnswer).meta_info
            if (meta.finish_reason or {}).get("type") != "abort":
                right = [token for _, token, _ in meta.input_token_logprobs] == list(token_ids)
                return [log_prob for log_prob, _, _ in meta.input_token_logprobs] if right else []
        raise EngineUnavailable(f"{url}: the probe of its weights was aborted {PROBE_TRIES} times")

    async def given_log_probs(
        self, engine: str, rid: str, token_ids: Sequence[int], first: int, timeout_s: float, topk: int = 0
    ) -> GivenLogProbs:
        """Return the log-probs of given tokens at temperature 1, each given all tokens before it.

        Args:
            engine: URL of the engine.
            rid: id of the request; the engine refuses a second one while the first runs.
            token_ids: all tokens, at least two.
            first: number of tokens before the first one of the answer, at least 1.
            timeout_s: for the answer.
            topk: number of the likeliest tokens to return at each place; 0: none.

        Returns:
            One for each token from `first` on, and `topk` tokens with theirs at each of these places.

        Raises:
            EngineUnavailable: no answer, or the request was aborted, e.g. by another client.
            EngineFailed: the answer is unreadable, or for other tokens or another number of them.
            RequestRefused: the request is invalid.
        """
        url, asked = engine + "/generate", list(token_ids[first:])
        data = await self._post(url, probe_body(rid, token_ids, first - 1, topk), timeout_s)
        return await to_thread.run_sync(read_given, url, data, asked, topk)

    async def abort(self, engine: str, rid: str | None) -> None:
        """Abort one request, or all requests of an engine if rid is None. Unknown requests are ignored."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        send = self._command if rid is None else self._post  # requests of others, or our own
        await send(engine + "/abort_request", body, self._admin_timeout_s)

    async def flush_cache(self, engine: str, within_s: float) -> None:
        """Flush an engine's cache once it is idle.

        Raises:
            RequestRefused: it is not idle within that time.
        """
        await self._command(f"{engine}/flush_cache?timeout={within_s:g}", {}, within_s + self._admin_timeout_s)

    async def release_memory(self, engine: str, tags: Sequence[str]) -> None:
        """Make an idle engine release memory; memory.py ensures the order."""
        await self._command(engine + "/release_memory_occupation", {"tags": tags}, self._stall_s)

    async def resume_memory(self, engine: str, tags: Sequence[str]) -> None:
        """Make an engine resume memory."""
        await self._command(engine + "/resume_memory_occupation", {"tags": tags}, self._stall_s)

    async def workers(self, router: str) -> list[RouterWorker]:
        """Return the router's worker list."""
        url = router + "/workers"
        return decode_control(url, await self._send("GET", url, None, self._admin_timeout_s), WorkerList).workers

    async def add_worker(self, router: str, engine: str) -> None:
        """Add an engine to the router, which registers it in the background."""
        body: dict[str, Any] = {"url": engine}
        if self._run:
            body["labels"] = {RUN_LABEL: self._run}
        if self._key is not None and not engine.startswith(self._strangers):
            body["api_key"] = self._key.reveal()
        await self._post(router + "/workers", body, self._admin_timeout_s)

    async def remove_worker(self, router: str, worker: RouterWorker) -> None:
        """Remove an engine from the router."""
        await self._send("DELETE", f"{router}/workers/{worker.id}", None, self._admin_timeout_s)

    async def order(self, url: str, body: dict[str, Any], timeout_s: float) -> None:
        """Send a control call without a result; used by updates.py."""
        await self._command(url, body, timeout_s)

    async def _command(self, url: str, body: dict[str, Any], timeout_s: float) -> None:
        await self._guarded_post(url, body, timeout_s)

    async def _guarded_post(self, url: str, body: dict[str, Any], timeout_s: float) -> bytes:
        if self._guard is not None:
            await self._guard(url.rpartition("/")[0])
        return await self._post(url, body, timeout_s)

    async def _post(self, url: str, body: dict[str, Any], timeout_s: float) -> bytes:
        return await self._send("POST", url, msgspec.json.encode(body), timeout_s)

    async def _look(self, url: str) -> bytes:
        """Send a GET request, repeating it after a timeout."""
        for _ in range(SILENT_TRIES - 1):
            with suppress(EngineSilent):
                return await self._send("GET", url, None, self._admin_timeout_s)
        return await self._send("GET", url, None, self._admin_timeout_s)

    async def _send(self, method: str, url: str, data: bytes | None, timeout_s: float) -> bytes:
        async with self._request(method, url, data, timeout_s) as response:
            return await _read_all(url, response, self._max_answer_bytes)

    @asynccontextmanager
    async def _request(
        self, method: str, url: str, data: bytes | None, timeout_s: float, routing_key: str = ""
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield a successful response, to be read in the block."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = self._plain if url.startswith(self._strangers) else self._with_key
        headers = headers | {ROUTING_KEY: routing_key} if routing_key else headers
        try:
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                if response.status >= 300:
                    raise _error(url, response.status, _shown(await _read_all(url, response, self._max_answer_bytes)))
                yield response
        except TimeoutError as error:  # some timeouts are ClientErrors too
            raise EngineSilent(f"{url}: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{url}: {error!r}") from error


def _error(url: str, code: int, message: str, *, label: str = "") -> EngineError:
    if code in REFUSALS:
        return RequestRefused(f"{url}: {message}", label=label)
    return (EngineBusy if code in PASSING else EngineFailed)(f"{url}: {code} {message}", label=label)


def _add(url: str, reader: AnswerReader, event: bytes) -> None:
    try:
        reader.add_chunk(event)
    except (ValueError, RecursionError) as error:
        label = label_in(event) or reader.last_label
        raise BadAnswer(url, f"bad chunk: {_problem(error)}: {_shown(event)}", label) from error


def _problem(error: Exception) -> str:
    return "its lists and objects are nested too deeply" if isinstance(error, RecursionError) else str(error)


async def _read_all(url: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read a response. Raises EngineFailed if it exceeds `max_bytes`."""
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > max_bytes:
            raise EngineFailed(f"{url}: the answer is larger than {max_bytes} bytes")
    return bytes(data)


def _raise_streamed(url: str, event: bytes) -> None:
    """Raise the error in a stream event: a server streams an error in the form of its usual error response."""
    if not event.startswith(b'{"error"'):
        return
    error = decode_control(url, event, ErrorEvent).error
    raise _error(url, error.code or 0, error.message)


def _shown(answer: bytes) -> str:
    return answer.decode(errors="replace")[:500]


def _take_answers(url: str, data: bytes, readers: Sequence[AnswerReader]) -> None:
    """Read the answers to the requests of a batch, or to one request. A long response is for a thread.

    Raises:
        EngineFailed: server error; BadAnswer: an unreadable or invalid answer.
        RequestRefused: the request is invalid.
    """
    try:
        answers = [decode_answer(data)] if len(readers) == 1 else decode_answers(data)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(url, f"unreadable answer: {_problem(error)}: {_shown(data)}", label_in(data)) from error
    if len(answers) != len(readers):
        raise BadAnswer(url, f"{len(answers)} answers to {len(readers)} prompts", label_in(data))
    for reader, answer in zip(readers, answers, strict=True):
        label = answer.meta_info.weight_version or ""
        if (refused := refusal_in(answer.meta_info)) is not None:
            raise _error(url, refused.code, refused.message, label=label)
        try:
            reader.add_whole(answer)
        except (ValueError, RecursionError) as error:
            unreadable = "" if type(error) is ValueError else "unreadable answer: "
            raise BadAnswer(url, f"{unreadable}{_problem(error)}", label) from error
