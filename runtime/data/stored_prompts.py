"""Large prompts: stored once, in parts. Tasks and events cite the parts' sequences, score requests their keys."""

import hashlib
from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

import msgspec

from messages import EvalRequested, EvalSetRequested, Int32Array, MessageT, Prompt, PromptStored, RolloutRequested
from messages.codec import DecodeError, pack, unpack
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost, PayloadUnreadable

LARGE_BYTES: Final = 64 << 10  # of a whole prompt, since a task and every score request would repeat it
LARGE_METADATA_BYTES: Final = 1 << 10  # since the completion event of each group would repeat it
PART_BYTES: Final = 4 << 20
SHOWN_CHARS: Final = 2000  # shown characters of a large prompt
DIGEST_CHARS: Final = 32

Task = TypeVar("Task", RolloutRequested, EvalRequested)
StoredT = TypeVar("StoredT", Prompt, "_PromptsOfSet")


class _PromptsOfSet(msgspec.Struct, frozen=True, eq=False):
    """The prompts of an evaluation set, as they are stored."""

    prompts: tuple[Prompt, ...]


class Fetches(Protocol):
    """A client that fetches payloads by their sequences: the bus, or an auditor."""

    async def fetch(self, message_type: type[MessageT], seq: int) -> MessageT: ...


class FetchesByKey(Protocol):
    """A client that fetches payloads by their keys: the bus, or that of an external worker."""

    async def fetch_by_key(self, message_type: type[MessageT], key: str) -> MessageT: ...


def is_large(prompt: Prompt) -> bool:
    """Return whether a prompt is stored separately."""
    return len(msgspec.msgpack.encode(prompt.metadata)) > LARGE_METADATA_BYTES or len(pack(prompt)) > LARGE_BYTES


async def store_prompt(bus: Bus, prompt: Prompt, *, part_bytes: int = PART_BYTES) -> tuple[int, ...]:
    """Store a prompt in parts; return their sequences in the data stream, by which tasks cite the prompt.

    Args:
        bus: the bus.
        prompt: the full prompt.
        part_bytes: maximum bytes of one stored part.

    Raises:
        StreamFull: the data stream is full.
        BusUnavailable: the bus is not reachable.
    """
    return await _store(bus, pack(prompt), data=prompt.data, row=prompt.row, part_bytes=part_bytes)


async def stored_set(bus: Bus, task: EvalSetRequested) -> EvalSetRequested:
    """Return the task of a set ready to publish: large prompts, and all of them if they are many, are stored and cited.

    Raises:
        As of `store_prompt`.
    """
    prompts = [cited(each, await store_prompt(bus, each)) if is_large(each) else each for each in task.prompts]
    content = pack(_PromptsOfSet(tuple(prompts)))
    if len(content) <= LARGE_BYTES:
        return msgspec.structs.replace(task, prompts=tuple(prompts))
    parts = await _store(bus, content, data=task.set, row=0, part_bytes=PART_BYTES)
    return msgspec.structs.replace(task, prompts=(), parts=parts)


async def _store(bus: Bus, content: bytes, *, data: str, row: int, part_bytes: int) -> tuple[int, ...]:
    digest = hashlib.sha256(content).hexdigest()[:DIGEST_CHARS]
    pieces = [content[at : at + part_bytes] for at in range(0, len(content), part_bytes)]
    seqs: list[int] = []
    for part, piece in enumerate(pieces):
        stored = PromptStored(data=data, row=row, part=part, num_parts=len(pieces), content=piece, digest=digest)
        seqs.append(await bus.publish(stored))
    return tuple(seqs)


def cited(prompt: Prompt, parts: tuple[int, ...]) -> Prompt:
    """Return the reference to a stored prompt, for a task."""
    none = Int32Array([])
    return Prompt(data=prompt.data, row=prompt.row, text="", prompt_ids=none, rm_type=prompt.rm_type, parts=parts)


async def fetch_prompt(bus: Fetches, parts: tuple[int, ...]) -> Prompt:
    """Fetch a stored prompt by the sequences of its parts. The result includes its parts and their keys.

    Raises:
        PayloadLost: a part is lost, or the parts do not form one prompt.
    """
    stored = [await bus.fetch(PromptStored, seq) for seq in parts]
    keys = tuple(part.key() for part in stored) if all(part.digest for part in stored) else ()
    return msgspec.structs.replace(_joined(stored, Prompt, f"data messages {parts}"), parts=parts, keys=keys)


async def fetch_prompt_by_keys(bus: FetchesByKey, keys: tuple[str, ...]) -> Prompt:
    """Fetch a stored prompt by the keys of its parts, as reward workers do.

    Raises:
        PayloadLost: a part is lost, or the parts do not form one prompt.
    """
    return _joined([await bus.fetch_by_key(PromptStored, key) for key in keys], Prompt, f"data messages {keys}")


def _joined(parts: Iterable[PromptStored], of: type[StoredT], place: str) -> StoredT:
    try:
        return unpack(b"".join([part.content for part in parts]), of)
    except DecodeError as error:
        raise PayloadUnreadable(f"prompt in {place}: {error}") from error


async def prompts_of_set(bus: Fetches, task: EvalSetRequested) -> tuple[Prompt, ...]:
    """Return the full prompts of a set's task.

    Raises:
        PayloadLost: a part of them is lost, or they are not those of the task.
    """
    prompts = task.prompts
    if task.parts:
        stored = [await bus.fetch(PromptStored, seq) for seq in task.parts]
        prompts = _joined(stored, _PromptsOfSet, f"data messages {task.parts}").prompts
    if len(prompts) != task.num_items:
        raise PayloadLost(f"{len(prompts)} prompts for a set of {task.num_items}")
    return tuple([await fetch_prompt(bus, each.parts) if each.parts else each for each in prompts])


async def with_prompt(bus: Bus, task: Task) -> Task:
    """Return a task with its full prompt.

    Raises:
        PayloadLost: a part of the prompt is lost.
    """
    if not task.prompt.parts:
        return task
    return msgspec.structs.replace(task, prompt=await fetch_prompt(bus, task.prompt.parts))
