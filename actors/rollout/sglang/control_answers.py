"""Decodes responses other than generated tokens: of control calls, probes and the router, and errors in a stream."""

from typing import Annotated, Any, Final, TypeVar

import msgspec

from actors.rollout.sglang.answers import Count
from actors.rollout.sglang.errors import EngineFailed
from actors.rollout.sglang.given import LogProbOf

T = TypeVar("T")
RUN_LABEL: Final = "physarum_run"  # of an engine at a router
MAX_REQUESTS: Final = 1_000_000  # of a scheduler: a load that reports more is refused


class RankSums(msgspec.Struct, frozen=True):
    """Checksums of the tensors that one rank of an engine holds."""

    checksums: dict[str, str] = {}


class ChecksumAnswer(msgspec.Struct, frozen=True):
    """Response of /weights_checker."""

    success: bool
    per_engine_checksum: str | None = None
    ranks: tuple[RankSums, ...] = ()


class AdapterAnswer(msgspec.Struct, frozen=True):
    """Response of /load_lora_adapter."""

    loaded_adapters: dict[str, str] = {}  # directories by name
    checksums: dict[str, str] = {}  # of the tensors as read, by name of the adapter; empty: SGLang reports none


class ServedModel(msgspec.Struct, frozen=True):
    """The used part of an entry of /v1/models: the base model, or an adapter."""

    id: str
    root: str = ""
    parent: str | None = None  # of an adapter


class ServedModels(msgspec.Struct, frozen=True):
    """Response of /v1/models."""

    data: tuple[ServedModel, ...] = ()


class ModelInfo(msgspec.Struct, frozen=True):
    """The used part of /model_info."""

    weight_version: str | None = None


class ProbeMeta(msgspec.Struct, frozen=True):
    """The used part of the meta_info of a probe response."""

    finish_reason: dict[str, Any] | None = None
    input_token_logprobs: list[LogProbOf] = []


class ProbeAnswer(msgspec.Struct, frozen=True):
    """Response of /generate to a probe."""

    meta_info: ProbeMeta


class StreamedError(msgspec.Struct, frozen=True):
    """An error inside a stream, after the request was answered with status 200 before any validation."""

    message: str = ""
    code: int | None = None


class ErrorEvent(msgspec.Struct, frozen=True):
    """A stream event with an error instead of tokens."""

    error: StreamedError


LoadCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)]


class Queues(msgspec.Struct, frozen=True):
    """The used part of a scheduler's queues."""

    retracted: LoadCount = 0  # requests that were retracted since the statistics before the newest ones


class Load(msgspec.Struct, frozen=True):
    """The used part of a scheduler's load; it changes with every token."""

    num_running_reqs: LoadCount = 0
    num_waiting_reqs: LoadCount = 0
    num_used_tokens: Count = 0
    token_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0  # share of the KV cache that running requests use
    queues: Queues | None = None


class LoadsAnswer(msgspec.Struct, frozen=True):
    """Response of /v1/loads."""

    loads: tuple[Load, ...] = ()


class RouterWorker(msgspec.Struct, frozen=True):
    """An engine in the router's worker list."""

    id: str
    url: str
    is_healthy: bool = False
    metadata: dict[str, Any] = {}

    @property
    def run(self) -> str:
        """Name of the run that added it; empty if none did."""
        return str(self.metadata.get(RUN_LABEL, ""))


class WorkerList(msgspec.Struct, frozen=True):
    """Response of the router's GET /workers."""

    workers: list[RouterWorker] = []


def decode_control(url: str, data: bytes, answer_type: type[T]) -> T:
    """Decode a JSON response to the given type.

    Raises:
        EngineFailed: the data is not of this type.
    """
    try:
        return msgspec.json.decode(data, type=answer_type)
    except RecursionError as error:
        raise EngineFailed(f"{url}: unreadable answer: its lists and objects are nested too deeply") from error
    except ValueError as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors too
        raise EngineFailed(f"{url}: unreadable answer: {error}") from error
