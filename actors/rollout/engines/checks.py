"""Checks of an engine: what it serves against the recipe, and whether it generates."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar, cast

import aiohttp
import anyio
import msgspec
import structlog

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.facts import OVERRIDES
from runtime.models.directory import CONFIG, read_json
from runtime.models.quantization import QUANTIZATION
from runtime.settings.derived import quantization
from runtime.settings.placement import served_dtype
from runtime.settings.reading.config import Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import Topology, keeps_prefixes, model_of

log = structlog.get_logger()

T = TypeVar("T")

TINY_PROMPT: Final = (0, 0)  # of a request that shows that an engine generates


class WrongEngine(EngineError):
    """An external engine does not serve what the recipe asks for."""


class ServerRequirements(NamedTuple):
    """Properties that the recipe requires of a server."""

    architectures: tuple[str, ...]
    dtype: str  # empty: any
    context: int  # tokens of the longest sample; 0: no limit in the recipe
    keeps_prefixes: bool = True  # the prefix cache may be enabled
    one_replica: bool = True  # it has no replicas behind its URL, which a weight update would not reach
    quantized: str = ""  # model directory whose weights are quantized, and their updates are not; empty: none

    @classmethod
    def by(cls, topology: Topology, engine: EngineConfig) -> Self:
        """Derive the requirements for a pool from the topology and the model directory.

        Raises:
            OSError, ValueError: the model directory is unreadable.
        """
        directory, is_frozen = Path(model_of(topology, engine)), engine.hf_checkpoint is not None
        return cls(
            architectures=read_json(directory, CONFIG, _Model).architectures,
            dtype="" if is_frozen else served_dtype(topology, engine),
            context=topology.rollout.max_context_len or 0,
            keeps_prefixes=is_frozen
            or topology.rollout.on_weight_update != "in_place"
            or keeps_prefixes(topology, engine),
            one_replica=not is_frozen,
            quantized=str(directory) if updates_lose_quantization(topology, engine) else "",
        )


def updates_lose_quantization(topology: Topology, engine: EngineConfig) -> bool:
    """Return whether the model's files are quantized and its weight updates to an engine are not."""
    return engine.hf_checkpoint is None and engine.weight_format != "fp8" and quantization(topology) is not None


class _Model(msgspec.Struct, frozen=True):
    architectures: tuple[str, ...] = ()


def check_server(url: str, says: Mapping[str, Any], wanted: ServerRequirements) -> None:
    """Compare a server's reported configuration with the requirements.

    Properties that it does not report are covered by the weight verification.

    Args:
        url: of the server.
        says: merged responses of /server_info and /model_info.
        wanted: by the recipe.

    Raises:
        WrongEngine: with each key, its value, and the allowed values.
    """
    wrong = list(_differences(says, wanted))
    if wrong:
        raise WrongEngine(f"{url} does not fit the recipe: {'; '.join(wrong)}")


def _differences(says: Mapping[str, Any], wanted: ServerRequirements) -> Iterator[str]:
    architectures = says.get("architectures")
    if architectures and wanted.architectures and tuple(architectures) != wanted.architectures:
        yield _wrong("architectures", list(architectures), f"{list(wanted.architectures)}, those of hf_checkpoint")
    if says.get("is_generation") is False:
        yield _wrong("is_generation", False, "true")
    dtype = says.get("dtype")
    if wanted.dtype and dtype not in (None, "auto", wanted.dtype):
        yield _wrong("dtype", dtype, f"{wanted.dtype}, from model.dtype and weight_format")
    dp_size = says.get("dp_size")
    if wanted.one_replica and dp_size not in (None, 1):
        yield _wrong("dp_size", dp_size, "1: each replica is an engine with a URL of its own")
    if not wanted.keeps_prefixes and says.get("disable_radix_cache") is False:
        yield _wrong("disable_radix_cache", False, 'true with rollout.on_weight_update = "in_place" and a router')
    if wanted.quantized and says.get("model_path") == wanted.quantized and not _drops_quantization(says):
        yield _wrong(OVERRIDES, says.get(OVERRIDES), f'{{"{QUANTIZATION}": null}}, as weight updates are not quantized')
    room = says.get("max_req_input_len")  # the rest of its context length, or of its memory if that is less
    if isinstance(room, int) and room < wanted.context:
        yield _wrong("max_req_input_len", room, f"at least rollout.max_context_len = {wanted.context}")


def _drops_quantization(says: Mapping[str, Any]) -> bool:
    """Return whether a server was started without the quantization that its model's config.json has."""
    overrides = says.get(OVERRIDES)
    try:
        found: Any = msgspec.json.decode(overrides) if isinstance(overrides, str) else overrides
    except msgspec.DecodeError:
        return False
    keys = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    return not keys.get(QUANTIZATION, True)


def _wrong(key: str, value: object, allowed: str) -> str:
    return f"{key} = {value!r}; allowed: {allowed}"


async def check_engine(client: SglangClient, url: str, wanted: ServerRequirements) -> None:
    """Check an engine's configuration against the recipe.

    Raises:
        WrongEngine: it does not serve what the recipe asks for.
        EngineError: it does not respond.
    """
    says = await client.server_info(url) | await client.model_info(url)
    check_server(url, says, wanted)


async def makes_tokens(client: SglangClient, url: str, within_s: float) -> bool:
    """Whether an engine scores a tiny prompt in time, or at least reports a changed load."""
    before = await answered(within_s, lambda: client.loads(url))
    with anyio.move_on_after(within_s):
        try:
            await client.prompt_log_probs(url, TINY_PROMPT)
        except EngineError as error:
            log.debug("no_sign_of_life", url=url, error=str(error))
        else:
            return True
    after = await answered(within_s, lambda: client.loads(url))
    return before is not None and after is not None and before != after


async def answered(within_s: float, ask: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of a call; None after the timeout."""
    with anyio.move_on_after(within_s):
        return await ask()
    return None


def url_problems(key: str, urls: Sequence[str], wanted: ServerRequirements) -> Iterator[Problem]:
    """Yield the external engines that do not respond or do not fit the recipe; `key` is the setting with their URLs."""
    for url, reason in anyio.run(_refusals, urls, wanted).items():
        yield Problem.of(key, url, reason)


async def _refusals(urls: Sequence[str], wanted: ServerRequirements) -> dict[str, str]:
    reasons: dict[str, str] = {}

    async def ask(client: SglangClient, url: str) -> None:
        try:
            await check_engine(client, url, wanted)
        except EngineError as error:
            reasons[url] = str(error)

    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        for url in urls:
            group.start_soon(ask, SglangClient(session), url)
    return reasons
