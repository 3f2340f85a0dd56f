"""External clients change and read nothing of a run but what docs/run/external-clients.md allows.

The tries come from nats-server's own subjects, not from our table of rights. The server reports no refusal of a reply
subject: these tests compare the state of the server before and after.
"""

import base64
import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import anyio
import pytest

from tests.fixtures.nats import eventually
from tests.rights.api_subjects import WHEEL, in_binary, installed_binary, is_known, stored
from tests.rights.scene import (
    AUDIT,
    CLIENTS,
    HISTORY,
    MAY_PUBLISH,
    MAY_READ,
    OWN_DURABLE,
    OWN_SCORES,
    OWN_WORK,
    PROMPT,
    PROMPTS,
    RUN,
    WORK,
    Scene,
    difference,
    scene,
)
from tests.rights.tries import Try, forbidden_replies, refused, subjects_of_a_run, subscriptions, with_reply
from tests.support.flushed import flushed

pytestmark = pytest.mark.anyio
ATTACKERS = ("alice", "bob", "dave")
BATCH = 200
PRIVATE = "q7f3m"  # part of the inboxes that others cannot know
MAY_CHANGE = {  # by allowed publishes: alice's own queue, by pulls and acknowledgements
    "alice": (f"consumer {OWN_DURABLE}", f"messages {OWN_WORK}", f"kept {WORK}"),
    "bob": (),
    "dave": (),
}
SECRET = re.compile(rb"secret of ([^ \"\\]+)")


@pytest.fixture
async def attacked(tmp_path: Path) -> AsyncGenerator[Scene, None]:
    async with scene(tmp_path) as made:
        for name in CLIENTS:
            await made.strangers[name].listen(f"_INBOX.r.{name}.{PRIVATE}.>")
        yield made


def test_the_subjects_are_those_of_the_installed_server() -> None:
    version, subjects = stored()
    assert version == metadata.version(WHEEL), "another nats-server: run tests/rights/api_subjects.py on its source"
    unknown = sorted(text for text in in_binary(installed_binary()) if not is_known(text, set(subjects)))
    assert not unknown, "run tests/rights/api_subjects.py on the source of this nats-server"


async def send(made: Scene, user: str, tries: Iterable[Try]) -> None:
    """Publish all tries, and wait until the server has processed them."""
    who = made.strangers[user]
    for number, one in enumerate(tries):
        await who.nc.publish(one.subject, one.body, one.reply, one.headers)
        if number % 64 == 63:
            await who.nc.flush()
    await made.settle(who)
    assert who.nc.is_connected, f"{user} was disconnected: {who.refused[-1:]}"


async def check_unchanged(made: Scene, user: str, groups: Iterable[tuple[str, list[Try]]], *may: str) -> None:
    """Send groups of tries, and compare the state of the run and what others received after each.

    Raises:
        AssertionError: something changed that `may` does not name.
    """
    await made.strangers[user].listen(f"_INBOX.{RUN}.{user}.try")
    for name, tries in batched(groups):
        await made.return_tasks()
        before = await made.state()
        await send(made, user, tries)
        changed = difference(before, await made.state(), may)
        assert not changed, f"{user}: {name}: {changed}"
        check_heard(made, user, name)
    await check_settled(made, user)


async def check_settled(made: Scene, user: str) -> None:
    """Fail if the last tries still change anything."""
    before = await made.state()
    await send(made, user, [])
    assert not difference(before, await made.state())


def check_heard(made: Scene, user: str, what: str) -> None:
    """Compare what everybody received with what they may receive from the tries of one client."""
    heard = made.take_heard()
    own = heard.pop(user)
    read = {match.decode() for one in own for match in SECRET.findall(one.data + inner(one.data))}
    assert all(subject.startswith(MAY_READ[user]) for subject in read), f"{user}: {what}: read {read}"
    if user == "alice":
        heard["run"] = [one for one in heard["run"] if not one.subject.startswith(OWN_SCORES)]
    assert not any(heard.values()), f"{user}: {what}: {heard}"


def inner(data: bytes) -> bytes:
    """Stored messages inside an answer of the server."""
    return b"".join(base64.b64decode(found) for found in re.findall(rb'"data":"([A-Za-z0-9+/=]+)"', data))


@pytest.mark.parametrize("user", ATTACKERS)
async def test_a_refused_publish_changes_nothing(attacked: Scene, user: str) -> None:
    await check_unchanged(attacked, user, refused(user, MAY_PUBLISH[user]))


@pytest.mark.slow
@pytest.mark.parametrize("user", ATTACKERS)
async def test_no_reply_of_an_allowed_publish_reaches_the_run(attacked: Scene, user: str) -> None:
    await check_replies(attacked, user)


async def check_replies(made: Scene, user: str) -> None:
    """Send every allowed publish with every subject as its reply.

    Raises:
        AssertionError: something changed but the client's own tasks.
    """
    replies = [f"_INBOX.{RUN}.{user}.try", *MAY_PUBLISH[user], *forbidden_replies(user, MAY_PUBLISH[user])]
    groups = ((reply, with_reply(user, reply)) for reply in replies)
    await check_unchanged(made, user, groups, *MAY_CHANGE[user])


@pytest.mark.parametrize("user", ATTACKERS)
async def test_a_subscription_brings_nothing_of_others(attacked: Scene, user: str) -> None:
    await check_subscriptions(attacked, user)


async def check_subscriptions(made: Scene, user: str) -> None:
    """Subscribe to everything, and let the run and the others work.

    Raises:
        AssertionError: the client received something that it may not read, or somebody else lacks an answer.
    """
    who = made.strangers[user]
    for subject, queue in subscriptions():
        await who.listen(subject, queue)
    await made.settle(who)
    for subject in subjects_of_a_run():
        if not subject.endswith((">", "*")):
            await made.node.publish(subject, f"secret of {subject}".encode())
    await flushed(made.node)
    for other in ("amy", "carol"):
        await work_as(made, other)
    await view_as(made, "bob")
    await audit_as(made, "dave")
    await made.settle(who)
    may_hear = ("phy.r.event.",) if user == "bob" else ()
    heard = [one for one in who.heard if not one.subject.startswith(may_hear)]
    assert not heard, f"{user} received {heard}"
    assert who.nc.is_connected


async def work_as(made: Scene, name: str, timeout_s: float = 30.0) -> None:
    """Do what a worker does, with what the page allows.

    Raises:
        nats.errors.Error: no answer.
    """
    nc, grader = made.strangers[name].nc, CLIENTS[name][1]
    consumer = f"{WORK}.score-{grader}"
    for api in ("$JS.API", f"$JS.{RUN}.API"):
        pull = f"{api}.CONSUMER.MSG.NEXT.{consumer}"
        task = await nc.request(pull, b'{"batch":1}', timeout=timeout_s, old_style=True)
        assert task.data.startswith(b"secret of phy.r.work.score." + grader.encode()), task
        await nc.request(task.reply, b"+WPI", timeout=timeout_s)
        await nc.request(task.reply, b"+ACK", timeout=timeout_s)
    info = await nc.request(f"$JS.{RUN}.API.CONSUMER.INFO.{consumer}", timeout=timeout_s)
    assert json.loads(info.data)["name"] == f"score-{grader}"
    prompt = await nc.request(PROMPTS, timeout=timeout_s)
    assert prompt.data == f"secret of {PROMPT}".encode()
    before = len(made.in_run.heard)
    await nc.publish(f"phy.r.scores.{grader}.x8s0", b"scores")
    with anyio.fail_after(timeout_s):
        await eventually(lambda: any(one.data == b"scores" for one in made.in_run.heard[before:]))


async def view_as(made: Scene, name: str, timeout_s: float = 30.0) -> None:
    """Do what a viewer does, with what the page allows.

    Raises:
        nats.errors.Error: no answer.
    """
    nc = made.strangers[name].nc
    event = await nc.request(HISTORY, b'{"seq":1}', timeout=timeout_s, old_style=True)
    assert event.data == b"secret of phy.r.event.ledger.group_issued"
    inbox = f"_INBOX.{RUN}.{name}.history"
    many, live = await nc.subscribe(inbox), await nc.subscribe("phy.r.event.>")
    await nc.publish(HISTORY, b'{"seq":1,"batch":3}', inbox)
    subjects = [(await many.next_msg(timeout_s)).header["Nats-Subject"] for _ in range(3)]
    assert subjects == ["phy.r.event.ledger.group_issued"] * 3
    await flushed(nc)
    await made.node.publish("phy.r.event.new", b"new")
    with anyio.fail_after(timeout_s):
        while (await live.next_msg(timeout_s)).data != b"new":
            pass


async def audit_as(made: Scene, name: str, timeout_s: float = 30.0) -> None:
    """Do what an auditor does, with what the page allows.

    Raises:
        nats.errors.Error: no answer.
    """
    nc = made.strangers[name].nc
    stored = await nc.request(AUDIT, b'{"seq":2}', timeout=timeout_s, old_style=True)
    assert stored.data == b"secret of phy.r.data.segments.1.1"
    inbox = f"_INBOX.{RUN}.{name}.audit"
    many = await nc.subscribe(inbox)
    await nc.publish(AUDIT, b'{"seq":1,"batch":3}', inbox)
    subjects = [(await many.next_msg(timeout_s)).header["Nats-Subject"] for _ in range(3)]
    assert subjects == [PROMPT, "phy.r.data.segments.1.1", "phy.r.data.segments.1.1"]


async def test_what_the_page_allows_works(attacked: Scene) -> None:
    for worker in ("alice", "amy", "carol"):
        await work_as(attacked, worker)
    await view_as(attacked, "bob")
    await audit_as(attacked, "dave")


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("", ""),
        ("alice", ""),
        ("alice", "of-bob"),
        ("node", "of-alice"),
        ("carol", "of-nodes"),
        ("$SYS", ""),
        ("sys", "sys"),
    ],
)
async def test_a_wrong_login_is_refused(attacked: Scene, user: str, password: str) -> None:
    host, _, port = attacked.url.removeprefix("nats://").rpartition(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        login = json.dumps({"user": user, "pass": password, "verbose": False})
        await stream.send(f"CONNECT {login}\r\nPING\r\n".encode())
        heard = b""
        with anyio.fail_after(200):
            while b"-ERR" not in heard and b"PONG" not in heard:
                heard += await stream.receive()
    assert b"-ERR 'Authorization Violation'" in heard


def batched(groups: Iterable[tuple[str, list[Try]]]) -> Iterator[tuple[str, list[Try]]]:
    """Join groups of tries into larger ones, which are compared at once."""
    names: list[str] = []
    joined: list[Try] = []
    for name, tries in groups:
        names.append(name)
        joined += tries
        if len(joined) >= BATCH:
            yield ", ".join(names), joined
            names, joined = [], []
    yield ", ".join(names), joined
