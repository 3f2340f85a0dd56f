"""Every order of what happens in small runs, with deaths: no state breaks a law. `just model` explores further.

A setup is small enough that its states are few, and has the faults that are to meet. Breadth first: what is left out at
the limit is further from the start than all that was looked at.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from actors.buffer.deciding.decide import EvalPlan, Schedule
from messages import BatchReady
from runtime.ledger.state import LedgerState
from runtime.ledger.steps import Steps
from tests.model.explore import Counterexample, explore
from tests.model.world import Broken, Faults, Setup

EVALS = (EvalPlan(name="e", interval=1, num_items=1),)


def setup(name: str, faults: Faults, *, verdicts: bool = False, save_interval: int = 1, **schedule: Any) -> Setup:
    fields = {"num_steps": 2, "rollout_batch_size": 1, "over_sampling_batch_size": 1, "num_samples": 1, **schedule}
    return Setup(name=name, schedule=Schedule(**fields), faults=faults, verdicts=verdicts, save_interval=save_interval)


SETUPS = [
    setup("deaths", Faults(die=1, restart=1)),
    setup("damaged checkpoints", Faults(die=2, damage=2), num_steps=3),
    setup("a frozen trainer", Faults(freeze=1, at_once=1, die=1, damage=1)),
    setup("two frozen trainers", Faults(freeze=2, at_once=1)),
    setup("lost payloads", Faults(lose=2, die=1, late=1), over_sampling_batch_size=2),
    setup("lost payloads and a frozen trainer", Faults(lose=1, freeze=1), max_staleness=1),
    setup("one step off", Faults(die=1, late=1), max_staleness=1, over_sampling_batch_size=2, save_interval=2),
    setup("two steps off", Faults(freeze=1), max_staleness=2, num_steps=3),
    setup("old tokens", Faults(halt=1, die=1), max_staleness=1, max_token_staleness=1, over_sampling_batch_size=2),
    setup("a filter", Faults(drop=1, spill=1), verdicts=True, over_sampling_batch_size=2),
    setup("a filter and spares", Faults(drop=2), verdicts=True, keep_when_insufficient=True, max_barren_groups=2),
    setup("halts by hand", Faults(halt=2, spill=1, fail=1), rollout_batch_size=2, over_sampling_batch_size=2),
    setup("halts that drop", Faults(halt=1, restart=1), over_sampling_batch_size=2, on_halt="drop"),
    setup("halts that restart", Faults(halt=1, late=1), over_sampling_batch_size=2, on_halt="restart", refill="group"),
    setup("surplus", Faults(fail=1), over_sampling_batch_size=2, on_surplus="drop", halts=False, max_staleness=1),
    setup("a selection", Faults(die=1), over_sampling_batch_size=2, over_sampling_filter="user:function"),
    setup("evaluations", Faults(die=1, damage=1, restart=1), evals=EVALS),
    setup("evaluations one step off", Faults(freeze=1), evals=EVALS, max_staleness=1),
    setup("evaluations before all else", Faults(lose=1, die=1), evals=EVALS, max_staleness=1, eval_overlap=False),
]


@pytest.mark.slow  # 20 s of a core in all
@pytest.mark.parametrize("explored", SETUPS, ids=lambda each: each.name)
def test_no_order_of_events_breaks_a_law(explored: Setup) -> None:
    found = explore(explored, 3_000, end_every=20)
    assert found.states > 300
    assert found.finished or not found.whole


@pytest.mark.nightly
@pytest.mark.parametrize("explored", SETUPS, ids=lambda each: each.name)
def test_no_order_of_events_breaks_a_law_further_on(explored: Setup) -> None:
    """About 10^7 states in all."""
    assert explore(explored, 600_000, end_every=200).finished


def never(*_: object) -> bool:
    return False


def always(*_: object) -> bool:
    return True


def without_lost(state: LedgerState) -> int:
    """The lowest sequence that live groups alone need."""
    return min([group.payload_seq for group in state.groups.values()], default=state.newest_payload + 1)


def takes_any(steps: Steps, event: BatchReady) -> bool:
    return event.step >= steps.round or event.step in steps.taken_back


@pytest.mark.parametrize(
    ("of", "where", "what", "instead", "said"),
    [
        ("a frozen trainer", Steps, "is_replaced", never, "is trained, and|second batch|stands still|in steps|twice"),
        ("damaged checkpoints", LedgerState, "low_water", without_lost, "may be purged"),
        ("deaths", Steps, "takes_batch", never, "second batch"),
        ("lost payloads", LedgerState, "num_halting", property(lambda _: 1), "stands still"),
    ],
)
def test_a_fault_of_the_ledger_is_found(
    monkeypatch: pytest.MonkeyPatch, of: str, where: type, what: str, instead: Callable[..., object], said: str
) -> None:
    (found,) = (each for each in SETUPS if each.name == of)
    monkeypatch.setattr(where, what, instead)
    with pytest.raises(Counterexample, match=said):
        explore(found, 20_000)


def test_a_counterexample_is_the_shortest_log(monkeypatch: pytest.MonkeyPatch) -> None:
    (deaths,) = (each for each in SETUPS if each.name == "deaths")
    monkeypatch.setattr("tests.model.world._check_line", _refuse)
    with pytest.raises(Counterexample) as found:
        explore(deaths, 1_000)
    told = str(found.value).splitlines()
    assert told[0] == "deaths: refused"
    assert told[1].startswith("after 5 actions: ")  # weights, issue, completion, batch, train
    types = [msgspec.json.decode(line[line.index("{") :])["type"] for line in told[2:]]
    assert types == [
        "buffer_started",
        "trainer_started",
        "weights_announced",
        "groups_issued",
        "group_completed",
        "batch_ready",
    ]


def _refuse(_line: object) -> None:
    raise Broken("refused")
