"""What becomes of a request, for each way in which a try may end: the decision table."""

from itertools import product

import pytest

from actors.rollout.requests.verdict import Asked, End, Isolation, Outcome, Verdict, end_of, judge
from actors.rollout.sglang.errors import (
    AbortedUnasked,
    BadAnswer,
    EngineBusy,
    EngineError,
    EngineFailed,
    EngineSilent,
    EngineUnavailable,
    PrefixOutdated,
    RequestRefused,
    TokensUnverified,
)

RESEND, REFUSE, ABORTED, KEEP = Outcome.RESEND, Outcome.REFUSE, Outcome.ABORTED, Outcome.KEEP
AGAIN, FAILURE = Verdict(RESEND, keeps_tokens=False), Verdict(RESEND, keeps_tokens=False, is_failure=True)
GOES_ON, GOES_ON_FAILED = Verdict(RESEND), Verdict(RESEND, is_failure=True)
STREAMED, WHOLE, TOKENS, NONE, DIED, LIVES = True, False, True, False, True, False
NO, HALT, UPDATE = Asked.NO, Asked.HALT, Asked.UPDATE

# an unusual answer (its family), how the try ends, streamed, had tokens, asked, engine died -> what becomes of it
ROWS: list[tuple[str, End, bool, bool, Asked, bool, Verdict]] = [
    ("HTTP: 200 with an empty body, HTML, {}, a list of two", End.FAILED, WHOLE, NONE, NO, LIVES, FAILURE),
    ("HTTP: 200 and only [DONE], streamed", End.LOST, STREAMED, NONE, NO, LIVES, FAILURE),
    ("HTTP: a redirect or a loop of them", End.FAILED, WHOLE, NONE, NO, LIVES, FAILURE),
    ("HTTP: 500", End.FAILED, STREAMED, NONE, NO, LIVES, FAILURE),
    ("HTTP: broken gzip", End.LOST, WHOLE, NONE, NO, LIVES, FAILURE),
    ("HTTP: an error object under 200, code 500", End.FAILED, STREAMED, NONE, NO, LIVES, FAILURE),
    ("HTTP: an error object under 200, code 400", End.REFUSED, STREAMED, NONE, NO, LIVES, Verdict(REFUSE, False)),
    ("framing: a chunk with broken JSON or bad UTF-8", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("framing: the first chunk with broken JSON", End.FAILED, STREAMED, NONE, NO, LIVES, FAILURE),
    ("framing: an event without end", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("framing: chunks lost, doubled or swapped", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("log-probs: null, NaN, infinite, missing or shifted", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("log-probs: null in a whole answer", End.FAILED, WHOLE, TOKENS, NO, LIVES, FAILURE),
    ("ids: outside of the vocabulary, whole", End.FAILED, WHOLE, NONE, NO, LIVES, FAILURE),
    ("counts: more or fewer tokens than said", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("counts: zero tokens and a stop", End.FAILED, WHOLE, NONE, NO, LIVES, FAILURE),
    ("labels: spans short, long or overlapping", End.FAILED, WHOLE, TOKENS, NO, LIVES, FAILURE),
    ("labels: another weight_version, whole", End.UNVERIFIED, WHOLE, TOKENS, NO, LIVES, AGAIN),
    ("labels: another weight_version from the start", End.UNVERIFIED, STREAMED, NONE, NO, LIVES, AGAIN),
    ("labels: another weight_version later", End.UNVERIFIED, STREAMED, TOKENS, NO, LIVES, GOES_ON),
    ("identity: another request id", End.FAILED, STREAMED, NONE, NO, LIVES, FAILURE),
    ("identity: another model behind the port", End.UNVERIFIED, STREAMED, NONE, NO, DIED, AGAIN),
    ("ends: reason null or unknown", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("ends: an abort that nobody asked for, with tokens", End.ABORTED, STREAMED, TOKENS, NO, LIVES, GOES_ON),
    ("ends: the same, whole", End.ABORTED, WHOLE, TOKENS, NO, LIVES, GOES_ON),
    ("ends: an abort that nobody asked for, no tokens", End.ABORTED, WHOLE, NONE, NO, LIVES, FAILURE),
    ("ends: an abort with status 400", End.REFUSED, STREAMED, TOKENS, NO, LIVES, Verdict(REFUSE, False)),
    ("ends: an abort with status 500", End.FAILED, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("ends: an abort with status 503, queue full", End.BUSY, STREAMED, NONE, NO, LIVES, FAILURE),
    ("ends: HTTP status 503", End.BUSY, WHOLE, NONE, NO, LIVES, FAILURE),
    ("time: slow loris or silence, given up", End.LOST, STREAMED, TOKENS, NO, LIVES, GOES_ON_FAILED),
    ("time: /ready 200 while /generate hangs", End.LOST, WHOLE, NONE, NO, LIVES, FAILURE),
    ("death: of the engine in mid-stream", End.LOST, STREAMED, TOKENS, NO, DIED, GOES_ON),
    ("death: of the engine before the headers", End.LOST, STREAMED, NONE, NO, DIED, AGAIN),
    ("death: of the engine, whole", End.LOST, WHOLE, NONE, NO, DIED, AGAIN),
    ("death: a busy router without engines", End.BUSY, WHOLE, NONE, NO, DIED, AGAIN),
    ("good: streamed", End.FINISHED, STREAMED, TOKENS, NO, LIVES, Verdict(KEEP)),
    ("good: whole, in the moment of a halt", End.FINISHED, WHOLE, TOKENS, HALT, LIVES, Verdict(KEEP)),
    ("halt: aborted, with tokens", End.ABORTED, STREAMED, TOKENS, HALT, LIVES, Verdict(ABORTED)),
    ("halt: aborted in the queue", End.ABORTED, WHOLE, NONE, HALT, LIVES, Verdict(ABORTED)),
    ("halt: lost meanwhile, with tokens", End.LOST, STREAMED, TOKENS, HALT, LIVES, Verdict(ABORTED)),
    ("halt: a bad whole answer", End.FAILED, WHOLE, TOKENS, HALT, LIVES, Verdict(ABORTED, False)),
    ("update: aborted, with tokens", End.ABORTED, STREAMED, TOKENS, UPDATE, LIVES, GOES_ON),
    ("update: aborted in the queue", End.ABORTED, WHOLE, NONE, UPDATE, LIVES, GOES_ON),
    ("update: lost meanwhile", End.LOST, STREAMED, NONE, UPDATE, LIVES, FAILURE),
    ("update: its cached prefix is of older weights", End.OUTDATED, STREAMED, NONE, NO, LIVES, AGAIN),
    ("update: the same of a batch, of which one was read", End.OUTDATED, WHOLE, TOKENS, NO, LIVES, AGAIN),
    ("update: the same in the moment of a halt", End.OUTDATED, WHOLE, TOKENS, HALT, LIVES, Verdict(ABORTED, False)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_becomes_of_a_request(row: tuple[str, End, bool, bool, Asked, bool, Verdict]) -> None:
    _, end, streamed, tokens, asked, died, verdict = row
    for isolation in (Isolation.NO, Isolation.YES):  # alone or not, its end means the same
        found = judge(end, streamed=streamed, had_tokens=tokens, asked=asked, engine_died=died, isolation=isolation)
        assert found == verdict


def test_in_every_case_a_request_is_bounded_and_nothing_wrong_is_kept() -> None:
    for end, streamed, tokens, asked, died, isolation in product(
        End, (True, False), (True, False), Asked, (True, False), Isolation
    ):
        found = judge(end, streamed=streamed, had_tokens=tokens, asked=asked, engine_died=died, isolation=isolation)
        assert (found.outcome is KEEP) == (end is End.FINISHED and isolation is not Isolation.POISON)
        assert (found.outcome is REFUSE) == (end is End.REFUSED or isolation is Isolation.POISON)
        if found.outcome is RESEND and not died and not found.keeps_tokens:  # the same request is not sent for ever
            assert found.is_failure or end in (End.UNVERIFIED, End.OUTDATED)
        assert end is not End.OUTDATED or not found.keeps_tokens
        if found.outcome is RESEND and end not in (End.ABORTED, End.FINISHED, End.OUTDATED):
            assert found.keeps_tokens == (streamed and tokens)
        assert asked is not Asked.HALT or found.outcome is not RESEND


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (RequestRefused("400"), End.REFUSED),
        (TokensUnverified(""), End.UNVERIFIED),
        (PrefixOutdated(""), End.OUTDATED),
        (AbortedUnasked(""), End.ABORTED),
        (EngineBusy("503"), End.BUSY),
        (EngineFailed("500"), End.FAILED),
        (BadAnswer("engine", "a log-prob is null"), End.FAILED),
        (EngineSilent(""), End.LOST),
        (EngineUnavailable("the stream broke off"), End.LOST),
    ],
)
def test_how_a_try_ended_that_raised(error: EngineError, end: End) -> None:
    assert end_of(error) is end
