"""What the tests of rights try: every subject with a meaning to the server or the run, as subject and as reply."""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from tests.rights.api_subjects import stored
from tests.rights.scene import (
    ACK,
    AUDIT,
    DATA,
    EVENT,
    HISTORY,
    INFO,
    KV,
    PROMPT,
    PROMPTS,
    PULL,
    PULL_OF_JETSTREAM_CLIENTS,
    SCORE,
    STREAMS,
    WORK,
)

GET: Final = "$JS.API.DIRECT.GET"
FORGED: Final = b"forged"
ACKS: Final = (b"+ACK", b"-NAK", b"+WPI", b"+TERM", b'+NXT {"batch":1,"no_wait":true}', b"")
CONSUMERS: Final = ((WORK, "score-math"), (WORK, "score-code"), (WORK, "rollout"), (EVENT, "reader"), (DATA, "new"))
NAMES: Final = (*STREAMS, "new", "r", "RUN", "GRADERS-math", "GRADERS-code")
NEXT_OF_OTHERS: Final = f"CONSUMER.MSG.NEXT.{WORK}.score-code"
LATER: Final = "2100-01-01T00:00:00Z"


class Try(NamedTuple):
    """A publish."""

    subject: str
    body: bytes = FORGED
    reply: str = ""
    headers: dict[str, str] | None = None


def meant_subjects() -> dict[str, list[str]]:
    """Concrete subjects by pattern, for each pattern of nats-server."""
    return {pattern: sorted(set(_filled(pattern))) for pattern in stored()[1]}


def _filled(pattern: str) -> Iterator[str]:
    """Put names of the run into the wildcards of a pattern."""
    if pattern.endswith("."):
        pattern += ">"
    stars = pattern.count("*")
    rests = ("x", "phy.r.event.ledger.forged", "STREAM.PURGE.phy-r-work", NEXT_OF_OTHERS) if ">" in pattern else ("",)
    names: Iterable[tuple[str, ...]]
    if stars == 0:
        names = [()]
    elif stars == 1:
        names = [(name,) for name in NAMES]
    else:
        names = [(*pair, *(["phy.r.work.x"] * (stars - 2))) for pair in CONSUMERS]
    for chosen, rest in itertools.product(names, rests):
        given = iter(chosen)
        yield "".join(next(given) if part == "*" else rest if part == ">" else part for part in _parts(pattern))


def _parts(pattern: str) -> list[str]:
    return [part for part in pattern.replace("*", "\0*\0").replace(">", "\0>\0").split("\0") if part]


def bodies(subject: str, inbox: str) -> list[bytes]:
    """Bodies with which a request does what it can do."""
    name = next((name for name in NAMES if name in subject.split(".")), "new")
    config: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "storage": "memory"}
    push = {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "all", "name": "new"}
    by_verb: dict[str, list[Any]] = {
        "STREAM.CREATE": [config, {**config, "subjects": [], "sources": [{"name": WORK}]}],
        "STREAM.UPDATE": [{**config, "max_msgs": 1}],
        "STREAM.RESTORE": [{"config": config, "state": {"messages": 1}}],
        "STREAM.SNAPSHOT": [{"deliver_subject": inbox}],
        "MSG.DELETE": [{"seq": seq} for seq in (1, 2)],
        "MSG.GET": [{"seq": 1}, {"last_by_subj": ">"}],
        "DIRECT.GET": [{"seq": 1}, {"last_by_subj": "phy.r.>"}, {"multi_last": [">"], "batch": 9}],
        "CONSUMER.CREATE": [{"stream_name": name, "config": push}],
        "DURABLE.CREATE": [{"stream_name": name, "config": {**push, "durable_name": "new"}}],
        "CONSUMER.PAUSE": [{"pause_until": LATER}],
        "CONSUMER.RESET": [{"seq": 1}],
        "CONSUMER.UNPIN": [{"group": "x"}],
        "MSG.NEXT": [{"batch": 1, "no_wait": True}],
        "PEER": [{"peer": "x"}],
        "SERVER": [{"peer": "x"}],
        "$SYS.REQ": [{"account": "RUN"}, {"cid": 5}],
        "$JS.ACK": list(ACKS),
    }
    fit = [body for verb, known in by_verb.items() if verb in subject for body in known]
    return [b"", *(body if isinstance(body, bytes) else json.dumps(body).encode() for body in fit or [{}])]


def subjects_of_a_run() -> list[str]:
    """Subjects of the run that no external client may publish on."""
    return [
        *("phy.r.event.ledger.group_issued", "phy.r.event.forged", "phy.r.dead.forged", "phy.r.data.segments.9.9"),
        *("phy.r.work.rollout.9.9", "phy.r.work.score._own.forged", "phy.r.work.score.math.forged"),
        *("phy.r.work.score.code.forged", "phy.r.data.prompt.forged.0", PROMPT, "phy.r.work.score.code.c3"),
        *(SCORE, "phy.r.scores.code.x8s0", "phy.r.scores._own.x8s0", "phy.r.scores.x8s0", "phy.r2.scores.math.x8s0"),
        *("phy.r.call.rollout.0.halt", "phy.r.call.trainer.0.anything", "phy.r.call.x", "phy.r.call.buffer.halt"),
        *(
            "$KV.phy-r.claim.n0",
            "$KV.phy-r.engine_key",
            "$KV.phy-r.room.n0",
            "$KV.phy-r.forged",
            "$KV.phy-r",
            "$O.phy-r.C.x",
        ),
        *("_INBOX.r.node.guess", "_INBOX.r.node.guess.1", "_INBOX.r.carol.guess", "_INBOX.r.carol.*.*", "_INBOX.guess"),
        *("_R_.guess", "_R_.guess.1", "phy.r.event.>", "$KV.phy-r.*", "_INBOX.r.carol.>", ">", "*"),
    ]


def forged_acks() -> list[str]:
    """Acknowledgements of deliveries to others, in both forms."""
    numbers = [(seq, delivery) for seq in range(1, 12) for delivery in (1, 2)]
    others = [(WORK, "score-code"), (WORK, "score-_own"), (WORK, "rollout"), (EVENT, "reader")]
    old = [f"$JS.ACK.{s}.{c}.{d}.{n}.{n}.1700000000000000000.0" for s, c in others for n, d in numbers]
    at_end = [
        f"$JS.ACK.{WORK}.{c}.1.{n}.1.0.0" for c in ("score-code", "score-_own", "rollout") for n in range(598, 610)
    ]
    new = [f"$JS.ACK._.RUN.{s}.{c}.1.{n}.1.1700000000000000000.0" for s, c in others for n in range(1, 6)]
    return old + at_end + new


def refused(user: str, may_publish: Iterable[str]) -> Iterator[tuple[str, list[Try]]]:
    """Publishes that the server has to refuse, in named groups."""
    inbox, allowed = f"_INBOX.r.{user}.try", set(may_publish)
    for pattern, subjects in meant_subjects().items():
        yield pattern, [Try(s, body, inbox) for s in subjects if s not in allowed for body in bodies(s, inbox)]
    for subject in subjects_of_a_run():
        if subject in allowed:
            continue
        marks = [None, {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, {"Nats-Rollup": "all"}, {"Nats-TTL": "1s"}]
        yield subject, [Try(subject, FORGED, inbox, headers) for headers in marks]
    yield "forged acknowledgements", [Try(s, body, inbox) for s in forged_acks() for body in ACKS]
    gets = [f"{GET}.{KV}.$KV.phy-r.claim.n0", f"{GET}.{DATA}.phy.r.data.segments.1.1", f"{GET}.{DATA}.phy.r.data.>"]
    gets += [f"{GET}.{stream}" for stream in STREAMS if f"{GET}.{stream}" not in allowed]
    asked = [b"", b'{"seq":1}', b'{"last_by_subj":"$KV.phy-r.claim.n0"}', b'{"multi_last":[">"],"batch":9}']
    yield "direct gets", [Try(subject, body, inbox) for subject in gets for body in asked]
    watch = {"deliver_subject": inbox, "ack_policy": "none", "deliver_policy": "last_per_subject"}
    created = json.dumps({"stream_name": KV, "config": watch}).encode()
    yield (
        "watch of keys",
        [Try(f"$JS.API.CONSUMER.CREATE.{KV}{name}", created, inbox) for name in ("", ".w", ".w.$KV.>")],
    )


def with_reply(user: str, reply: str) -> list[Try]:
    """Every allowed publish, with one subject as its reply and as the destination of the server's traces."""
    if user == "bob":
        asked = [b'{"seq":1}', b'{"last_by_subj":"phy.r.event.run.started"}', b'{"seq":1,"batch":3}', b"", b"{"]
        publishes = [(HISTORY, body) for body in (*asked, b'{"multi_last":[">"],"batch":2}')]
    elif user == "dave":
        asked = [b'{"seq":1}', b'{"last_by_subj":"phy.r.data.segments.1.1"}', b'{"seq":1,"batch":3}', b"", b"{"]
        publishes = [(AUDIT, body) for body in (*asked, b'{"multi_last":[">"],"batch":2}')]
    else:
        pulls = (
            b'{"batch":1,"no_wait":true}',
            b'{"batch":1,"expires":1000000}',
            b'{"batch":0,"expires":1000000}',
            b"{",
            b'{"batch":99}',
        )
        beat = b'{"batch":1,"expires":30000000,"idle_heartbeat":10000000}'
        publishes = [(PULL, body) for body in (*pulls, beat)] + [(PULL_OF_JETSTREAM_CLIENTS, pulls[0])]
        publishes += [(ACK, body) for body in ACKS] + [(SCORE, FORGED), (SCORE, b""), (INFO, b""), (INFO, b"{}")]
        publishes += [(PROMPTS, body) for body in (b"", b'{"seq":1}', b'{"multi_last":[">"],"batch":9}')]
        publishes += [(f"{GET}.{DATA}.phy.r.data.prompt.{rest}", b"") for rest in ("x", ">", "*", "*.*")]
    traces = [{"Nats-Trace-Dest": reply}, {"Nats-Trace-Dest": reply, "Nats-Trace-Only": "true"}]
    traced = [Try(subject, body, reply, headers) for subject, body in publishes for headers in traces]
    return [Try(subject, body, reply) for subject, body in publishes] + traced


def forbidden_replies(user: str, may_publish: Iterable[str]) -> list[str]:
    """Subjects that must not be reached by the reply of an allowed publish."""
    meant = [subject for subjects in meant_subjects().values() for subject in subjects if not subject.endswith(">")]
    short = [s for s in meant if "new" not in s.split(".") or "CREATE" in s]
    found = dict.fromkeys([*subjects_of_a_run(), *short, *forged_acks()[:4]])
    return [subject for subject in found if subject not in set(may_publish)]


def subscriptions() -> list[tuple[str, str]]:
    """Subscriptions that must bring nothing: subject and queue."""
    wide = [">", "*", "*.>", "*.*", "*.*.>", "*.*.*.>", "phy.>", "phy.r.>", "phy.*.event.>", "*.r.event.>", "phy.r.*.>"]
    wide += ["$JS.>", "$KV.>", "$SYS.>", "_INBOX.>", "_INBOX.r.>", "_INBOX.*.*.>", "_R_.>", "$JS.ACK.>", "$JS.API.>"]
    exact = [s for s in (*subjects_of_a_run(), PULL, INFO, ACK, SCORE, PROMPTS, HISTORY)]
    exact += [f"$JS.API.CONSUMER.MSG.NEXT.{WORK}.score-code", f"$JS.ACK.{WORK}.score-code.>", "phy.r.scores.code.>"]
    exact += ["_INBOX.r.carol.>", "_INBOX.r.node.>", "phy.r.call.>", "phy.r.work.>", "phy.r.scores.>", "phy.r.data.>"]
    exact += ["$JS.EVENT.>", "$JS.EVENT.ADVISORY.>", "$SYS.ACCOUNT.>", "phy.r.dead.>"]
    return [(subject, queue) for subject in wide + exact for queue in ("", "actors", "_sys_")]
