"""Stores segments of one prompt group as data messages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from messages import Prompt, SegmentRef, SegmentsPublished
from runtime.bus.bus import Bus
from runtime.bus.errors import MessageTooLarge
from runtime.data.stored_prompts import SHOWN_CHARS


async def store(bus: Bus, message: SegmentsPublished) -> Sequence[SegmentRef]:
    """Publish segments, split into several messages if the server's size limit requires it; return their references.

    Raises:
        MessageTooLarge: a single segment exceeds the limit.
    """
    segments = message.segments
    try:
        seq = await bus.publish(message)
    except MessageTooLarge:
        if len(segments) <= 1:
            raise
        half = len(segments) // 2
        parts = [msgspec.structs.replace(message, segments=part) for part in (segments[:half], segments[half:])]
        return [ref for part in parts for ref in await store(bus, part)]
    return [SegmentRef(seq=seq, position=position) for position in range(len(segments))]


def text_of(prompt: Prompt) -> str:
    """Return the prompt text to store with samples: all of it, or its start if the prompt is stored separately."""
    return prompt.text[:SHOWN_CHARS] if prompt.parts else prompt.text


def label_of(prompt: Prompt) -> Any:
    """Return the label to store with samples; None if the prompt is stored separately."""
    return None if prompt.parts else prompt.label
