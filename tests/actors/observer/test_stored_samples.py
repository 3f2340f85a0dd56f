"""The page's samples of a run without dumps: read from a real nats-server with an auditor credential, when asked."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest

from actors.observer import stored_samples as module
from actors.observer.page import Page, follow, served, stored_samples
from actors.observer.samples import Samples
from actors.observer.stored_samples import StoredSamples
from messages import (
    GroupCompleted,
    MessageT,
    Outcome,
    Plane,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    SegmentsPublished,
)
from runtime.bus.bus import Bus
from runtime.bus.errors import BusUnavailable
from runtime.bus.nats.accounts import ClientKind
from runtime.data.sample_index import SamplesGone
from runtime.node.claims.rundir import BUS_FILE
from runtime.node.external_clients import read_clients
from runtime.report.observed import Observed
from tests.actors.observer.test_page import ANY_PORT, TOKEN
from tests.actors.observer.test_samples import MODEL, answered
from tests.build.dumps import dumped_group
from tests.build.events import batch, verdict
from tests.fixtures.nats import eventually
from tests.runtime.node.test_following import RUN, a_run, found

pytestmark = pytest.mark.anyio

SETTINGS = {"observe.samples": "true", "model.hf_checkpoint": msgspec.json.encode(str(MODEL)).decode()}
ONE = SampleSummary(index=0, status=SampleStatus.COMPLETED, segments=(SegmentRef(seq=1, position=0),), reward=1.0)


async def publish_group(bus: Bus, group_id: int, prompt: str) -> tuple[int, int]:
    """Publish a group's samples and its completion; return the sequences of both."""
    group = dumped_group(group_id, (0.5, 1.0), prompt=prompt)
    segments = tuple(segment for own in group.segments for segment in own)
    payload = SegmentsPublished(group_id=group_id, attempt=0, lease="l", segments=segments, prompt=prompt, label="hi")
    seq = await bus.publish(payload)
    samples = tuple(
        msgspec.structs.replace(sample, segments=(SegmentRef(seq=seq, position=place),))
        for place, sample in enumerate(group.completed().samples)
    )
    return seq, await bus.publish(msgspec.structs.replace(group.completed(), samples=samples, round=4))


@asynccontextmanager
async def opened(run_dir: Path) -> AsyncGenerator[tuple[Any, Observed]]:
    """The page of a run that follows its log, and a client of it."""
    run, observed, said = found(run_dir), Observed(RUN), list[str]()
    stored = stored_samples(run, SETTINGS)
    page = Page(observed, TOKEN, SETTINGS, stored)
    async with (
        served(page, ANY_PORT) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", cookie_jar=aiohttp.DummyCookieJar()) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(follow, run, observed, page, said.append, said.append, stored)
        yield client, observed
        tasks.cancel_scope.cancel()


async def test_samples_that_the_server_still_stores_are_shown_until_the_run_removes_them(tmp_path: Path) -> None:
    async with a_run(tmp_path) as (bus, _), opened(tmp_path) as (client, observed):
        _, completed = await publish_group(bus, 1, "say <b>")
        second, dropped = await publish_group(bus, 2, "repeat")
        await bus.publish(verdict(2, dropped, Outcome.DROP, reason="zero_std"))
        last = await bus.publish(batch(7, (1, completed)))
        await eventually(lambda: observed.seq == last)
        assert [(client.name, client.kind) for client in read_clients(tmp_path / "bus").clients] == [
            ("observer", ClientKind.VIEWER)
        ]  # nobody has looked at samples
        status, listed = await answered(client, "/samples", sort="reward", order="ascending")
        assert (status, listed["problem"], listed["num_groups"], listed["next"]) == (200, "", 2, None)
        assert listed["source"].startswith("that the run's server still stores, read with an auditor credential")
        assert [(each["group"], each["step"], each["outcome"], each["prompt"]) for each in listed["groups"]] == [
            (1, 4, "in batch", "say <b>"),
            (2, 4, "dropped", "repeat"),
        ]
        assert [client.kind for client in read_clients(tmp_path / "bus").clients] == [
            ClientKind.VIEWER,
            ClientKind.AUDITOR,
        ]
        _, group = await answered(client, "/samples/group", group=2, step=4)
        assert (group["place"], group["reason"], group["label"]) == ("round 4", "zero_std", "hi")
        assert [(each["reward"], each["response"]) for each in group["samples"]] == [(0.5, "a"), (1.0, "ab")]
        _, tokens = await answered(client, "/samples/tokens", group=1, step=4, place=1)
        assert (tokens["ids"], tokens["log_probs"]) == ([5, 10, 11], [None, -0.5, -0.5])
        assert len(tokens["texts"]) == 3  # by the tokenizer of the model
        assert "run.dump_details" in tokens["untrained"]
        _, searched = await answered(client, "/samples", search="REPEAT")
        assert [each["group"] for each in searched["groups"]] == [2]

        await bus.publish(SegmentsPublished(group_id=3, attempt=0, lease="l", segments=(), prompt=""))
        cites = GroupCompleted(  # another group's samples
            group_id=3, attempt=0, lease="l", round=5, instance="r", data="d",
            samples=(msgspec.structs.replace(ONE, segments=(SegmentRef(seq=second, position=0),)),),
        )  # fmt: skip
        last = await bus.publish(cites)
        await eventually(lambda: observed.seq == last)
        status, wrong = await answered(client, "/samples/group", group=3)
        assert status == 409
        assert "cannot be used" in wrong["problem"]

        await bus.purge(Plane.DATA, below_seq=second)
        _, listed = await answered(client, "/samples")
        assert [each["group"] for each in listed["groups"]] == [3, 2]
        _, gone = await answered(client, "/samples/group", group=1)
        assert gone["problem"] == "The run's server stores no group 1."


async def test_the_page_reads_no_samples_unless_the_settings_allow_it_and_keeps_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_samples(found(tmp_path), {"observe.samples": "false"}) is None
    assert stored_samples(found(tmp_path), {"observe.samples": "true", "run.dump_details": '"dump"'}) is None
    monkeypatch.setattr(module, "KEPT_GROUPS", 2)
    stored = StoredSamples(found(tmp_path))
    for number in range(4):
        stored.take(GroupCompleted(
            group_id=number, attempt=0, lease="l", round=0, instance="r", data="d", samples=(ONE,)
        ), number + 5)  # fmt: skip
    assert (stored.since, stored.num_known) == (5, 2)
    with pytest.raises(LookupError, match="does not give its samples"):
        async with stored.opened():
            pass


async def test_the_samples_of_an_ended_run_are_not_asked_for_and_need_no_credential(tmp_path: Path) -> None:
    run = found(tmp_path)
    (run.directory / BUS_FILE).write_text("tls://n0:secret@127.0.0.1:1")
    with pytest.raises(SamplesGone, match="Those of a run that ended are in its dumps alone"):
        async with known_groups(run.directory, 1, live=False).opened():
            pass
    assert [path.name for path in run.directory.rglob("*") if path.is_file()] == [BUS_FILE]


class Server:
    """Stores each group's samples under its number as the sequence, with a long label; counts what is asked for."""

    def __init__(self) -> None:
        self.answers = True
        self.num_asked = 0

    async def first_seq(self) -> int:
        return 1

    async def fetch(self, message_type: type[MessageT], seq: int) -> MessageT:
        self.num_asked += 1
        if not self.answers:
            raise BusUnavailable("no server")
        segments = tuple(segment for own in dumped_group(seq).segments for segment in own)
        found = SegmentsPublished(
            group_id=seq, attempt=0, lease="l", segments=segments, prompt="p" * 10_000, label=["t" * 10_000]
        )
        assert isinstance(found, message_type)
        return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()

    @asynccontextmanager
    async def audited(_: object) -> AsyncGenerator[Server]:
        yield server

    monkeypatch.setattr(module, "audited", audited)
    return server


def known_groups(run_dir: Path, num: int, *, live: bool = True) -> StoredSamples:
    stored = StoredSamples(found(run_dir))
    stored.live = live
    for number in range(1, num + 1):
        completed = dumped_group(number).completed()
        samples = tuple(
            msgspec.structs.replace(sample, segments=(SegmentRef(seq=number, position=place),))
            for place, sample in enumerate(completed.samples)
        )
        stored.take(msgspec.structs.replace(completed, samples=samples), number)
    return stored


async def test_an_open_group_shows_what_became_of_it_since_it_was_read(tmp_path: Path, server: Server) -> None:
    stored = known_groups(tmp_path, 1)
    samples, query = Samples(None, stored), {"group": "1"}
    assert (await samples.answer(samples.group, query))["outcome"] == "in no batch"
    stored.take(verdict(1, 1, Outcome.DROP, reason="zero_std"), 2)
    again = await samples.answer(samples.group, query)
    assert (again["outcome"], again["reason"], server.num_asked) == ("dropped", "zero_std", 1)


async def test_a_list_keeps_the_begin_of_prompts_and_labels_alone(tmp_path: Path, server: Server) -> None:
    stored = known_groups(tmp_path, 3)
    stored.take(msgspec.structs.replace(dumped_group(4).completed(), samples=(), prompt_parts=(4,)), 4)
    samples = Samples(None, stored)
    for _ in range(2):
        listed = await samples.answer(samples.listed, {})
        assert [(each["group"], each["prompt"]) for each in listed["groups"]] == [(n, "p" * 160) for n in (3, 2, 1)]
        assert {each["label"] for each in listed["groups"]} == {('[\n "' + "t" * 200)[:160]}
    assert server.num_asked == 3
    async with stored.opened():
        kept = [stored.prompt(group) for group in stored.groups()]
    assert {len(text) for both in kept for text in both} == {module.KEPT_CHARS}


async def test_a_server_that_does_not_answer_is_asked_once_for_a_list(tmp_path: Path, server: Server) -> None:
    server.answers = False
    samples = Samples(None, known_groups(tmp_path, 3))
    listed = await samples.answer(samples.listed, {})
    assert ["does not give its samples" in each["prompt"] for each in listed["groups"]] == [True] * 3
    assert server.num_asked == 1
    await samples.answer(samples.listed, {})
    assert server.num_asked == 2
