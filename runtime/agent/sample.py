"""One sample of a finished group as people are shown it."""

from messages import GroupCompleted, SampleSummary, SegmentsPublished
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.report.report import SampleShown


async def sample_lines(bus: Bus, shown: SampleShown) -> list[str]:
    """The first sample of a group, in full; no lines if the log was trimmed meanwhile."""
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
    except (BusError, IndexError) as error:
        return [f"the {shown.which} sample cannot be shown: {error}"]
    return [
        f"{shown.which} sample: group {group.group_id}, {_headline(sample)}",
        f"  prompt    {first.prompt!r}",
        f"  response  {response!r}",
        f"  label     {'stored with the prompt' if group.prompt_parts else repr(first.label)}",
    ]


def _headline(sample: SampleSummary) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    tokens = f"{sample.prompt_len} + {sample.response_len} tokens"
    return f"{sample.status}, reward {reward}, weights v{sample.last_version}, {tokens}"
