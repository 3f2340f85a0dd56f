"""Formats one sample of a finished group for the terminal."""

from messages import GroupCompleted, SampleSummary, SegmentsPublished
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.data.stored_prompts import SHOWN_CHARS, fetch_prompt
from runtime.report.report import SampleShown
from runtime.util.formatting import shortened


async def sample_lines(bus: Bus, shown: SampleShown) -> list[str]:
    """Return the lines of a group's first sample; none if the log was trimmed meanwhile."""
    async with bus.read(GroupCompleted, from_seq=shown.seq) as events:
        received = await events.next()
    if received is None or received.seq != shown.seq:
        return []
    group = received.message
    if not group.samples:
        return [f"{shown.which} sample: group {group.group_id} has none"]
    sample = group.samples[0]
    try:
        published = [await bus.fetch(SegmentsPublished, ref.seq) for ref in sample.segments]
        cited = zip(published, sample.segments, strict=True)
        response = "".join(message.segments[ref.position].text for message, ref in cited)
        first = published[0]
        label = (await fetch_prompt(bus, group.prompt_parts)).label if group.prompt_parts else first.label
    except (BusError, IndexError) as error:
        return [f"the {shown.which} sample cannot be shown: {error}"]
    return [
        *shown.why,
        f"{shown.which} sample: group {group.group_id}, {_headline(sample, graded=shown.graded)}",
        f"  prompt    {first.prompt!r}",
        f"  response  {response!r}",
        f"  label     {shortened(repr(label), SHOWN_CHARS)}",
        *shown.causes,
    ]


def _headline(sample: SampleSummary, *, graded: bool) -> str:
    tokens = f"{sample.prompt_len} + {sample.response_len} tokens"
    if not graded:
        return f"a demonstration, {tokens}"
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    return f"{sample.status}, reward {reward}, weights v{sample.last_version}, {tokens}"
