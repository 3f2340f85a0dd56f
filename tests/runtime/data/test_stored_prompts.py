"""Large prompts are stored by themselves and come back whole, or not at all."""

from typing import Any

import pytest

from messages import Int32Array, Plane, Prompt, PromptStored
from messages.codec import pack
from runtime.bus.bus import Bus
from runtime.bus.errors import PayloadLost
from runtime.data.stored_prompts import cited, fetch_prompt, fetch_prompt_by_keys, is_large, store_prompt


def prompt(**fields: Any) -> Prompt:
    return Prompt(**{"data": "d", "row": 7, "text": "say", "prompt_ids": Int32Array([1, 2]), "rm_type": "f1", **fields})


@pytest.mark.parametrize(
    ("fields", "large"),
    [
        ({}, False),
        ({"metadata": {"k": "x" * 500}}, False),
        ({"metadata": {"k": "x" * 1500}}, True),  # each completed group's event would repeat it
        ({"label": "x" * 50_000}, False),
        ({"label": "x" * 70_000}, True),
        ({"text": "x" * 70_000}, True),
    ],
)
def test_what_events_or_score_requests_would_repeat_is_stored_once(fields: dict[str, Any], large: bool) -> None:
    assert is_large(prompt(**fields)) is large


@pytest.mark.anyio
async def test_a_prompt_of_several_parts_comes_back_whole(bus: Bus) -> None:
    whole = prompt(text="ä" * 1234, label={"a": [1, None]}, metadata={"k": "x" * 999})
    parts = await store_prompt(bus, whole, part_bytes=1000)
    assert len(parts) == 4
    back = await fetch_prompt(bus, parts)
    assert (back.text, back.label, back.metadata, back.parts) == (whole.text, whole.label, whole.metadata, parts)
    assert back.prompt_ids.tolist() == [1, 2]
    assert len({key.partition(".")[0] for key in back.keys}) == 1
    assert [key.partition(".")[2] for key in back.keys] == ["0", "1", "2", "3"]
    same = await fetch_prompt_by_keys(bus, back.keys)
    assert (same.text, same.label, same.metadata) == (whole.text, whole.label, whole.metadata)
    task = cited(whole, parts)
    assert (task.data, task.row, task.rm_type, task.text, task.label) == ("d", 7, "f1", "", None)


@pytest.mark.anyio
async def test_a_prompt_that_lacks_a_part_is_lost(bus: Bus) -> None:
    parts = await store_prompt(bus, prompt(text="x" * 3000), part_bytes=1000)
    keys = (await fetch_prompt(bus, parts)).keys
    with pytest.raises(PayloadLost):
        await fetch_prompt(bus, parts[1:])
    with pytest.raises(PayloadLost):
        await fetch_prompt_by_keys(bus, keys[1:])
    await bus.purge(Plane.DATA, below_seq=parts[1])
    with pytest.raises(PayloadLost):
        await fetch_prompt(bus, parts)
    with pytest.raises(PayloadLost):
        await fetch_prompt_by_keys(bus, keys)


@pytest.mark.anyio
async def test_prompts_of_equal_rows_have_keys_of_their_own(bus: Bus) -> None:
    """The row alone names no prompt: several data sources have a row 7."""
    one, other = prompt(text="one"), prompt(data="e", text="other")
    keys = [(await fetch_prompt(bus, await store_prompt(bus, each))).keys for each in (one, other, one)]
    assert [(await fetch_prompt_by_keys(bus, each)).text for each in keys] == ["one", "other", "one"]
    assert keys[0] == keys[2]


@pytest.mark.anyio
async def test_a_prompt_that_was_stored_without_a_digest_has_no_keys(bus: Bus) -> None:
    """As an older version stored it, under its row. Graders then get it with each request."""
    old = PromptStored(data="d", row=7, part=0, num_parts=1, content=pack(prompt()))
    assert old.key() == "7.0"
    back = await fetch_prompt(bus, (await bus.publish(old),))
    assert (back.text, back.keys) == ("say", ())
