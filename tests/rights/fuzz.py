"""Malformed and forged messages on the subjects that external clients may publish on."""

import json
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from messages import Score, ScoresGiven, encode
from tests.rights.tries import ACKS, Try

HUGE: Final = 1 << 20
TYPED: Final = {"Content-Type": "application/msgpack", "Physarum-Type": "scores_given"}


class Known(NamedTuple):
    """What the attacker knows of the run."""

    run: str
    token: str  # of its own grader
    inbox: str
    answers: Collection[str]  # last parts of the subjects that answers go to
    own: Sequence[str]  # ids of requests to its grader
    foreign: Sequence[str]  # ids of requests to another grader


def of_worker(known: Known, dice: random.Random, number: int) -> Iterator[Try]:
    """Fuzzed publishes of a reward worker, each on a subject that its credential allows."""
    kinds = (_score, _score, _score, _garbage, _garbage, _ack, _pull, _get)
    for _ in range(number):
        yield dice.choice(kinds)(known, dice)


def of_viewer(known: Known, dice: random.Random, number: int) -> Iterator[Try]:
    """Fuzzed requests of a viewer for stored events."""
    for _ in range(number):
        asked = {"seq": dice.choice((1, 0, -1, 2**64, "x")), "batch": dice.choice((1, 10**9, -1)), "max_bytes": 100}
        odd = (b"", b"{", dice.randbytes(40), b'{"multi_last":[">"]}', b'{"last_by_subj":"$KV.>"}', b"[" * 3000)
        body = dice.choice((json.dumps(asked).encode(), *odd))
        reply = dice.choice(
            (f"_INBOX.{known.run}.bob.try", f"$KV.phy-{known.run}.x", f"phy.{known.run}.event.ledger.x")
        )
        yield Try(f"$JS.API.DIRECT.GET.phy-{known.run}-event", body, reply)


def _score(known: Known, dice: random.Random) -> Try:
    """An answer that can be read: to a request of another grader, or with wrong ids, parts or rewards."""
    newest = known.foreign[-32:]  # their answers have not come yet
    if newest and dice.random() < 0.5:
        forged = Score(index=dice.randrange(4), reward=dice.choice((0.5, 0.25, -3.0)))
        encoded = encode(ScoresGiven(request_id=dice.choice(newest), scores=(forged,)))
        return Try(_answers(known, dice), encoded.payload, "", dict(encoded.headers))
    ids = dice.choice((known.own[-32:], known.own, known.foreign, ("x", "", "*", "a" * 10_000))) or ("x",)
    rewards = (0.5, -1e308, float("nan"), float("inf"), None, 1e-320, 7.0)
    scores = tuple(
        Score(
            index=dice.choice((part, 0, -1, 2**31, 2**63 - 1)),
            part=dice.choice((0, 0, 5, -9)),
            reward=dice.choice(rewards),
            error=dice.choice((None, None, "", "e" * 5000, "\x1b[2J\u202e")),
            details=dice.choice((None, {"a": {"b": [1, None, "\x00"]}}, {})),
        )
        for part in range(dice.choice((0, 1, 1, 2, 4, 64)))
    )
    encoded = encode(ScoresGiven(request_id=dice.choice(ids), scores=scores))
    return Try(_answers(known, dice), encoded.payload, dice.choice(("", known.inbox)), dict(encoded.headers))


def _garbage(known: Known, dice: random.Random) -> Try:
    """Bytes that are no answer, under headers that may say so."""
    whole = encode(ScoresGiven(request_id=dice.choice(known.foreign or ("x",)), scores=(Score(index=0, reward=1.0),)))
    cut = dice.randrange(len(whole.payload))
    body = dice.choice(
        (
            b"",
            dice.randbytes(dice.randrange(200)),
            whole.payload[:cut],
            whole.payload[:cut] + dice.randbytes(3) + whole.payload[cut + 1 :],
            b"\x91" * 5000,  # nested lists
            b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
            b"\xdd\x7f\xff\xff\xff\xc0",
            b"{" * 3000,
            json.dumps({"type": "scores_given", "request_id": 5, "scores": "x"}).encode(),
            b"\x82\xa4type\xacscores_given\xaarequest_id\xda\xff\xff",
            b"\x00" * HUGE if dice.random() < 0.02 else b"\x00" * 100,
        )
    )
    types = ("scores_given", "score_requested", "run_failed", "x" * 3000, "", "scores_given\t")
    headers = dice.choice(
        (
            None,
            TYPED,
            {**TYPED, "Physarum-Type": dice.choice(types)},
            {**TYPED, "Content-Type": dice.choice(("application/json", "text/html", "x" * 900))},
            {**TYPED, "Nats-Msg-Id": "1", "Nats-Rollup": "all", "Nats-Expected-Last-Sequence": "0", "Status": "503"},
        )
    )
    return Try(_answers(known, dice), body, "", headers)


def _answers(known: Known, dice: random.Random) -> str:
    last = dice.choice((*(known.answers or ("x",)), dice.choice(("x", "*", ">", "a.b.c", "0" * 500))))
    return f"phy.{known.run}.scores.{known.token}.{last}"


def _ack(known: Known, dice: random.Random) -> Try:
    numbers = [dice.choice((1, 2, dice.randrange(2000), 2**63 - 1, 2**64, -1)) for _ in range(5)]
    rest = dice.choice((".".join(map(str, numbers)), "x", "1.1", "1.2.3.4.5.6.7.8.9", "...", "_.RUN.1.2.3.4.5.6"))
    subject = f"$JS.ACK.phy-{known.run}-work.score-{known.token}.{rest}"
    body = dice.choice((*ACKS, b'-NAK {"delay": 9223372036854775807}', b'-NAK {"delay": -1}', b"-NAK x", b"\xff"))
    return Try(subject, body, dice.choice(("", known.inbox)))


def _pull(known: Known, dice: random.Random) -> Try:
    api = dice.choice(("$JS.API", f"$JS.{known.run}.API"))
    asked: dict[str, object] = {"batch": dice.choice((1, 1, 8, 0, -1, 256, 10**9)), "no_wait": True}
    if dice.random() < 0.5:
        asked = {
            "batch": dice.choice((1, 4)),
            "expires": dice.choice((1, 10**6, 10**8, -1, 10**18)),
            "idle_heartbeat": 1,
        }
    body = dice.choice((json.dumps(asked).encode(), dice.randbytes(20), b"7", b"[]", b'{"group":"x","min_pending":5}'))
    subject = f"{api}.CONSUMER.MSG.NEXT.phy-{known.run}-work.score-{known.token}"
    return Try(
        subject, body, dice.choice((known.inbox, "", f"phy.{known.run}.event.ledger.x", f"$KV.phy-{known.run}.x"))
    )


def _get(known: Known, dice: random.Random) -> Try:
    prompts = f"$JS.API.DIRECT.GET.phy-{known.run}-data.phy.{known.run}.data.prompt"
    info = f"$JS.{known.run}.API.CONSUMER.INFO.phy-{known.run}-work.score-{known.token}"
    subject = dice.choice((f"{prompts}.x.0", f"{prompts}.>", f"{prompts}.*", f"{prompts}.{'y' * 900}", info))
    body = dice.choice((b"", b"{", b'{"seq":1}', b'{"batch":100000,"multi_last":[">"]}', dice.randbytes(50)))
    return Try(subject, body, dice.choice((known.inbox, "", f"phy.{known.run}.call.rollout.0.halt")))
