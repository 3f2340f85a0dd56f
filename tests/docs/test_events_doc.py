"""docs/reference/events.md: its script, run as it stands there, shows the life of a group on a real server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from anyio.streams.text import TextReceiveStream

from messages.events import BatchTrained, GroupCompleted, Outcome, VerdictGiven
from messages.ledger import BatchReady, GroupRef, GroupsClosed, GroupsIssued, IssuedGroup
from messages.samples import SampleStatus, SampleSummary
from runtime.bus.bus import Bus
from tests.docs.snippets import snippets
from tests.fixtures.nats import NatsServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "events.md"


def completed(group_id: int) -> GroupCompleted:
    sample = SampleSummary(index=0, status=SampleStatus.COMPLETED, reward=0.5)
    return GroupCompleted(
        group_id=group_id, attempt=1, lease="l", round=0, instance="rollout.0", data="d", samples=(sample,)
    )


def trained(step: int) -> BatchTrained:
    return BatchTrained(
        step=step, incarnation=1, num_groups=1, num_samples=1, num_tokens=9, metrics={"train/loss": 0.1}
    )


async def publish_two_lives(bus: Bus) -> list[int]:
    """Groups 16 and 17, each in a batch of its own; returns where the events of group 17 are in the log."""
    issued = tuple(IssuedGroup(group_id=group_id, attempt=1, prompt=group_id) for group_id in (16, 17))
    life = [await bus.publish(GroupsIssued(incarnation=1, round=0, min_version=1, groups=issued))]
    for step, group_id in enumerate((16, 17)):
        seq = await bus.publish(completed(group_id))
        verdict = VerdictGiven(group_id=group_id, attempt=1, event_seq=seq, outcome=Outcome.KEEP)
        ref = GroupRef(group_id=group_id, attempt=1, event_seq=seq)
        seqs = [
            seq,
            await bus.publish(verdict),
            await bus.publish(BatchReady(incarnation=1, step=step, groups=(ref,))),
            await bus.publish(trained(step)),
        ]
        life += seqs if group_id == 17 else []
    closed = GroupsClosed(incarnation=1, group_ids=(17,), outcome="dropped", reason="to see it")
    return [*life, await bus.publish(closed)]


@pytest.mark.anyio
async def test_ten_lines_show_the_life_of_a_group(bus: Bus, nats_server: NatsServer, tmp_path: Path) -> None:
    (script,) = snippets(PAGE, "python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    await anyio.Path(tmp_path / "follow.py").write_text(script)
    life = await publish_two_lives(bus)
    command = [sys.executable, str(tmp_path / "follow.py"), bus.run, "17"]
    environment = {**os.environ, "NATS_URL": nats_server.url}
    printed = ""
    async with await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None, env=environment) as process:
        assert process.stdout is not None
        with anyio.move_on_after(15):
            async for text in TextReceiveStream(process.stdout):
                printed += text
                if printed.count("\n") == len(life):
                    break
        process.kill()
    lines = [line.split(" ", 1) for line in printed.splitlines()]
    assert [int(seq) for seq, _ in lines] == life
    assert [json.loads(event)["type"] for _, event in lines] == [
        "groups_issued",
        "group_completed",
        "verdict_given",
        "batch_ready",
        "batch_trained",
        "groups_closed",
    ]


def test_no_page_puts_the_password_on_a_command_line() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for line in page.read_text().splitlines():
            assert "bus.url)" not in line or line.strip().startswith("export "), f"{page.name}: {line}"
