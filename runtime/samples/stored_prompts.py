"""Prompts that are too large for tasks and events: stored once, in parts, and cited by the sequences of these."""

from typing import Final, TypeVar

import msgspec

from messages import EvalRequested, Int32Array, Prompt, PromptStored, RolloutRequested
from messages.codec import DecodeError, pack, unpack
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadUnreadable

LARGE_BYTES: Final = 64 << 10  # of a whole prompt: a task and every score request would repeat it
LARGE_METADATA_BYTES: Final = 1 << 10  # the event of each completed group would repeat it
PART_BYTES: Final = 4 << 20
SHOWN_CHARS: Final = 2000  # of a large prompt, with its samples

Task = TypeVar("Task", RolloutRequested, EvalRequested)


def is_large(prompt: Prompt) -> bool:
    """Whether a prompt is stored by itself."""
    return len(msgspec.msgpack.encode(prompt.metadata)) > LARGE_METADATA_BYTES or len(pack(prompt)) > LARGE_BYTES


async def store_prompt(bus: Bus, prompt: Prompt) -> tuple[int, ...]:
    """Store a prompt; return the sequences that cite it.

    Raises:
        StreamFull: the data stream takes no more.
        BusUnavailable: the bus.
    """
    content = pack(prompt)
    pieces = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    seqs: list[int] = []
    for part, piece in enumerate(pieces):
        stored = PromptStored(data=prompt.data, row=prompt.row, part=part, num_parts=len(pieces), content=piece)
        seqs.append(await bus.publish(stored))
    return tuple(seqs)


def cited(prompt: Prompt, parts: tuple[int, ...]) -> Prompt:
    """What a task says of a prompt that is stored by itself."""
    none = Int32Array([])
    return Prompt(data=prompt.data, row=prompt.row, text="", prompt_ids=none, rm_type=prompt.rm_type, parts=parts)


async def fetch_prompt(bus: Bus, parts: tuple[int, ...]) -> Prompt:
    """The prompt that is cited; it knows its parts.

    Raises:
        PayloadLost: a part is gone, or they are not those of one prompt.
    """
    content = b"".join([(await bus.fetch(PromptStored, seq)).content for seq in parts])
    try:
        return msgspec.structs.replace(unpack(content, Prompt), parts=parts)
    except DecodeError as error:
        raise PayloadUnreadable(f"prompt in data messages {parts}: {error}") from error


async def with_prompt(bus: Bus, task: Task) -> Task:
    """A task with all of its prompt.

    Raises:
        PayloadLost: a part of it is gone.
    """
    if not task.prompt.parts:
        return task
    return msgspec.structs.replace(task, prompt=await fetch_prompt(bus, task.prompt.parts))
