"""Increments of spilled samples: whoever dies, whatever comes twice or not at all, what is joined was stored so."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from messages import SampleStatus, SampleSummary, SegmentRef, SegmentsSpilled
from runtime.ledger.fold import LedgerState, fold
from runtime.ledger.groups import spills_of
from runtime.ledger.snapshots import num_items, pack_state, unpack_state
from tests.build.events import issued

NUM_SAMPLES = 2


def spilled(lease: str, *samples: SampleSummary, starts: tuple[int, ...] = ()) -> SegmentsSpilled:
    who = {"group_id": 0, "attempt": 0, "round": 0, "instance": "rollout"}
    return SegmentsSpilled(**who, lease=lease, samples=samples, starts=starts)


def sample(index: int, seqs: list[int], *, tokens: int, reward: float | None = None) -> SampleSummary:
    """With segments of these data messages."""
    refs = tuple(SegmentRef(seq=seq, position=index) for seq in seqs)
    return SampleSummary(index=index, status=SampleStatus.ABORTED, segments=refs, response_len=tokens, reward=reward)


class Worker:
    """A delivery of the task: its samples' segments, of one token each, and how many of them it told of."""

    def __init__(self, lease: str, given: tuple[SampleSummary, ...]) -> None:
        self.lease = lease
        self.seqs = {index: list[int]() for index in range(NUM_SAMPLES)}
        self.told = dict.fromkeys(self.seqs, 0)
        for summary in given:
            self.seqs[summary.index] = [ref.seq for ref in summary.segments]

    def spill(self) -> SegmentsSpilled | None:
        changed = [index for index, seqs in self.seqs.items() if len(seqs) > self.told[index]]
        samples = [sample(i, self.seqs[i][self.told[i] :], tokens=len(self.seqs[i])) for i in changed]
        starts = tuple(self.told[index] for index in changed)
        self.told |= {index: len(self.seqs[index]) for index in changed}
        return spilled(self.lease, *samples, starts=starts) if changed else None


ACTIONS = st.lists(
    st.sampled_from(["grow 0", "grow 1", "spill", "spill", "die", "die anew", "repeat", "lose", "snapshot", "zombie"]),
    min_size=20,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=ACTIONS)
# the first increment of a replaced delivery is stored again
@example(actions=["grow 0"] * 9 + ["spill", "die", "spill"] + ["grow 0"] * 6 + ["repeat", "spill"])
@example(
    actions=["grow 0", "spill", "die", "grow 0", "spill", "die anew", "grow 0", "spill", "repeat", "grow 0", "spill"]
)
def test_what_is_joined_is_what_one_delivery_had_whoever_dies_and_whatever_is_lost_or_repeated(
    actions: list[str],
) -> None:
    state, seq, data_seq = LedgerState(), 1, 0
    fold(state, issued(0), seq)
    worker, zombie, log = Worker("lease 0", ()), Worker("zombie", ()), list[SegmentsSpilled]()
    known: set[tuple[int, tuple[int, ...]]] = set()  # what some delivery had of a sample when it told of it
    best = dict.fromkeys(range(NUM_SAMPLES), 0)
    is_whole = True
    for number, action in enumerate(actions, start=1):
        events = list[SegmentsSpilled | None]()
        match action.split():
            case ["grow", index]:
                data_seq += 1
                worker.seqs[int(index)].append(data_seq)
                zombie.seqs[0].append(-data_seq)
            case ["spill"]:
                events = [worker.spill()]
            case ["die", *anew]:
                worker = Worker(f"lease {number}", () if anew else spills_of(state, 0, 0))
            case ["repeat"]:
                events = [log[-1 - number % min(3, len(log))]] if log else []
            case ["lose"]:
                is_whole = worker.spill() is None and is_whole
            case ["zombie"]:
                events = [zombie.spill()]
            case _:
                packed = pack_state(state, max_items=1)
                state = unpack_state(packed.chunks, packed.digest)
        for event in filter(None, events):
            teller = zombie if event.lease == "zombie" else worker
            if event.lease == teller.lease:
                known |= {(index, tuple(seqs[: teller.told[index]])) for index, seqs in teller.seqs.items()}
                best = {index: max(best[index], teller.told[index]) for index in best}
            log.append(event)
            seq += 1
            fold(state, event, seq)
        for joined in spills_of(state, 0, 0):
            refs = tuple(ref.seq for ref in joined.segments)
            assert len(refs) == joined.response_len
            assert (joined.index, refs) in known
        if is_whole and "zombie" not in actions:
            assert {joined.index: joined.response_len for joined in spills_of(state, 0, 0)} == {
                index: tokens for index, tokens in best.items() if tokens
            }
        assert num_items(state.groups[0]) <= 1 + 2 * NUM_SAMPLES * (1 + data_seq)


def joined_of(*events: SegmentsSpilled) -> tuple[SampleSummary, ...]:
    state = LedgerState()
    fold(state, issued(0), 1)
    for seq, event in enumerate(events, start=2):
        fold(state, event, seq)
    return spills_of(state, 0, 0)


def test_a_gap_is_found_and_the_segments_before_it_stay() -> None:
    first, second = spilled("a", sample(0, [1], tokens=5)), spilled("a", sample(0, [2], tokens=9), starts=(1,))
    third = spilled("a", sample(0, [3], tokens=12), starts=(2,))
    assert joined_of(first, third) == (sample(0, [1], tokens=5),)
    assert joined_of(second, third) == ()
    assert joined_of(first, second, third) == (sample(0, [1, 2, 3], tokens=12),)
    assert joined_of(first, second, third, second, first) == (sample(0, [1, 2, 3], tokens=12),)


def test_an_increment_of_another_lease_is_not_joined() -> None:
    first, other = spilled("a", sample(0, [1], tokens=5)), spilled("b", sample(0, [2], tokens=9), starts=(1,))
    assert joined_of(first, other) == (sample(0, [1], tokens=5),)


def test_a_lease_that_began_anew_counts_once_it_has_more_tokens() -> None:
    first, anew = spilled("a", sample(0, [1], tokens=5)), spilled("b", sample(0, [7], tokens=3))
    longer = spilled("b", sample(0, [8], tokens=6), starts=(1,))
    assert joined_of(first, anew) == (sample(0, [1], tokens=5),)
    assert joined_of(first, anew, longer) == (sample(0, [7, 8], tokens=6),)


def test_a_reward_comes_without_segments() -> None:
    first, scored = (
        spilled("a", sample(0, [1], tokens=5)),
        spilled("a", sample(0, [], tokens=5, reward=1.0), starts=(1,)),
    )
    assert joined_of(first, scored) == (sample(0, [1], tokens=5, reward=1.0),)


def test_an_event_of_an_earlier_version_lists_all_segments() -> None:
    whole = [spilled("a", sample(0, list(range(1, end)), tokens=end)) for end in (2, 4, 3)]
    assert joined_of(*whole) == (sample(0, [1, 2, 3], tokens=4),)


@pytest.mark.parametrize("starts", [(0,), (0, 0, 0), (0, -1)])
def test_starts_that_do_not_fit_the_samples_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="starts"):
        spilled("a", sample(0, [1], tokens=1), sample(1, [1], tokens=1), starts=starts)


def test_an_increment_is_as_large_as_what_is_new() -> None:
    """The sixtieth spill of a sample is no larger than its second one."""
    seqs = list(range(10**6, 10**6 + 60))
    sizes = [
        len(msgspec.json.encode(spilled("a", sample(0, seqs[k : k + 1], tokens=10**6 + k), starts=(k,))))
        for k in (10, 59)
    ]
    assert sizes[0] == sizes[1]
