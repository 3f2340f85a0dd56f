"""The tests of rights fail if a server's accounts are wrong: a right is missing, one is added, or no account is."""

import re
from pathlib import Path

import pytest
from nats.errors import Error as NatsError

from runtime.bus.errors import BusUnavailable
from tests.rights.scene import MAY_PUBLISH, accounts_text, scene
from tests.rights.test_rights import audit_as, check_replies, check_subscriptions, check_unchanged, view_as, work_as
from tests.rights.tries import refused

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ACCOUNT_OF = {"alice": "GRADERS-math", "bob": "VIEWERS", "dave": "AUDITORS"}
RIGHT = re.compile(r'\{ (?:service|stream): (?:\{ account: RUN, subject: )?"(.*?)".*\}')
OF_OTHERS = "code"
PATIENCE_S = 0.4  # for an answer, where none is expected
SERVICES = [  # user, and a subject on which it may publish too much
    ("alice", "$JS.API.STREAM.PURGE.phy-r-dead"),
    ("alice", "$JS.API.STREAM.CREATE.new"),
    ("alice", "$JS.API.CONSUMER.CREATE.KV_phy-r.>"),
    ("alice", "$JS.API.CONSUMER.PAUSE.phy-r-work.rollout"),
    ("alice", "$JS.API.CONSUMER.MSG.NEXT.phy-r-work.score-code"),
    ("alice", "$JS.API.DIRECT.GET.phy-r-data"),
    ("alice", "$JS.API.DIRECT.GET.KV_phy-r.>"),
    ("alice", "$JS.API.STREAM.MSG.GET.phy-r-event"),
    ("alice", "$JS.ACK.phy-r-work.rollout.>"),
    ("alice", "$JS.ACK.phy-r-work.score-code.>"),
    ("alice", "$KV.phy-r.>"),
    ("alice", "phy.r.scores.code.>"),
    ("alice", "phy.r.work.>"),
    ("alice", "phy.r.call.>"),
    ("alice", "_INBOX.r.node.>"),
    ("bob", "phy.r.event.>"),
    ("bob", "$JS.API.DIRECT.GET.phy-r-work"),
    ("bob", "$JS.API.CONSUMER.DELETE.phy-r-event.reader"),
    ("bob", "phy.r.scores.math.>"),
    ("dave", "$JS.API.DIRECT.GET.phy-r-event"),
    ("dave", "$JS.API.DIRECT.GET.phy-r-work"),
    ("dave", "$JS.API.CONSUMER.CREATE.phy-r-data"),
    ("dave", "phy.r.data.>"),
]
STREAMS = [  # user, and a subject that it may read too much
    ("alice", "phy.r.work.rollout.>"),
    ("alice", "phy.r.event.>"),
    ("bob", "$KV.phy-r.>"),
    ("bob", "phy.r.call.>"),
    ("bob", "phy.r.scores.>"),
    ("dave", "phy.r.event.>"),
]


def dropped() -> dict[str, str]:
    """Texts of accounts that lack one export, import or permission of alice, bob or dave, by what they lack."""
    text = accounts_text()
    lines, found, account = text.splitlines(), dict[str, str](), ""
    for number, line in enumerate(lines):
        if block := re.fullmatch(r"  ([\w-]+) \{", line):
            account = block[1]
        if account.endswith(OF_OTHERS) or f"score-{OF_OTHERS}" in line or f"scores.{OF_OTHERS}" in line:
            continue
        if match := RIGHT.search(line):
            found[f"{account}: {match[1]} ({number})"] = "\n".join(lines[:number] + lines[number + 1 :])
        for user in ACCOUNT_OF:
            if f'user: "{user}"' in line:
                for subject in re.findall(r'"([^"]*[.][^"]*)"', line):
                    changed = line.replace(f'"{subject}"', '"nothing"', 1)
                    found[f"{user}: {subject}"] = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
    return found


def granted(user: str, subject: str, *, kind: str) -> str:
    """Text of accounts in which a user may publish on one more subject of the run, or read it."""
    account, inside, lines = ACCOUNT_OF[user], "", list[str]()
    what = "publish" if kind == "service" else "subscribe"
    answers = ", response_type: Stream" if "DIRECT" in subject or "NEXT" in subject else ""
    export = f'{{ {kind}: "{subject}"{answers}, accounts: ['
    is_exported = export in accounts_text()
    for line in accounts_text().splitlines():
        if block := re.fullmatch(r"  ([\w-]+) \{", line):
            inside = block[1]
        if f'user: "{user}"' in line:
            line = line.replace(f"{what}: {{ allow: [", f'{what}: {{ allow: ["{subject}", ')
        lines.append(line.replace(export, f"{export}{account}, "))
        if inside == "RUN" and "exports: [" in line and not is_exported:
            lines.append(f"{export}{account}] }}")
        if inside == account and "imports: [" in line:
            lines.append(f'{{ {kind}: {{ account: RUN, subject: "{subject}" }} }}')
    return "\n".join(lines)


def all_in_the_run(user: str) -> str:
    """Text of accounts in which a user, with the permissions of the table, belongs to the account with the streams."""
    lines = accounts_text().splitlines()
    own = next(line for line in lines if f'user: "{user}"' in line)
    rest = "\n".join(line for line in lines if line != own)
    return rest.replace('users: [ { user: "node"', f'users: [ {own.strip()}, {{ user: "node"', 1)


@pytest.mark.parametrize("lacking", dropped())
async def test_a_missing_right_is_found(tmp_path: Path, lacking: str) -> None:
    async def try_all() -> None:
        async with scene(tmp_path, lambda _: dropped()[lacking]) as made:
            await work_as(made, "alice", PATIENCE_S)
            await view_as(made, "bob", PATIENCE_S)
            await audit_as(made, "dave", PATIENCE_S)

    with pytest.raises((NatsError, TimeoutError, BusUnavailable)):
        await try_all()


@pytest.mark.parametrize(("user", "subject"), SERVICES)
async def test_a_right_to_publish_too_much_is_found(tmp_path: Path, user: str, subject: str) -> None:
    async with scene(tmp_path, lambda _: granted(user, subject, kind="service")) as made:
        with pytest.raises(AssertionError, match=f"^{user}: "):
            await check_unchanged(made, user, refused(user, MAY_PUBLISH[user]))


@pytest.mark.parametrize(("user", "subject"), STREAMS)
async def test_a_right_to_read_too_much_is_found(tmp_path: Path, user: str, subject: str) -> None:
    async with scene(tmp_path, lambda _: granted(user, subject, kind="stream")) as made:
        with pytest.raises(AssertionError, match=f"^{user} "):
            await check_subscriptions(made, user)


@pytest.mark.parametrize("user", ACCOUNT_OF)
async def test_a_client_in_the_account_of_the_run_is_found(tmp_path: Path, user: str) -> None:
    async with scene(tmp_path, lambda _: all_in_the_run(user)) as made:
        with pytest.raises(AssertionError, match=f"^{user}: "):
            await check_replies(made, user)


async def test_graders_that_share_an_account_are_found(tmp_path: Path) -> None:
    def shared(text: str) -> str:
        lines = text.splitlines()
        begin, end = (next(i for i, line in enumerate(lines) if word in line) for word in ("S-code {", "VIEWERS {"))
        of_code = [line for line in lines[begin:end] if "code" in line and "account: RUN" in line]
        users = [line for line in lines[begin:end] if "user:" in line]
        kept = "\n".join(lines[:begin] + lines[end:]).replace("GRADERS-math, GRADERS-code", "GRADERS-math")
        kept = kept.replace("GRADERS-code", "GRADERS-math")
        head, mid, tail = kept.partition("GRADERS-math {")
        tail = tail.replace("imports: [", "\n".join(["imports: [", *of_code]), 1)
        return head + mid + tail.replace("users: [", "\n".join(["users: [", *users]), 1)

    async with scene(tmp_path, shared) as made:
        with pytest.raises(AssertionError, match=r"^alice: "):
            await check_replies(made, "alice")
