"""Lines of a terminal: each fits its width, bars add up, and no state depends on colour. Values by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.observer import terminal_lines as terminal
from actors.observer.observed import Observed
from messages import (
    ActorExited,
    ActorStarted,
    EngineLoad,
    EngineState,
    EngineStateChanged,
    LastSample,
    RunFinished,
    RunStalled,
)
from runtime.ledger.state import Books
from runtime.report.fold.spans import PARTS, StepTime
from tests.build.events import completed
from tests.support.log_of_a_run import LOG

COUNTS = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e5)


def step(number: int, **parts: float) -> StepTime:
    return StepTime(number, 100.0, 100.0 + sum(parts.values()), parts, {"train": "rank 1"} if "train" in parts else {})


def folded(*events: object) -> Observed:
    observed = Observed("r", 4)
    for seq, event in enumerate(events, 1):
        observed.apply(event, seq, 1000.0 + seq)  # pyright: ignore[reportArgumentType] - messages
    return observed


def test_every_part_and_every_state_has_a_character_of_its_own() -> None:
    assert list(terminal.PART_LETTERS) == list(PARTS)
    assert {*terminal.GROUP_STATES, "issued"} == {*Books.__struct_fields__}
    for marks in (terminal.PART_LETTERS, terminal.GROUP_STATES):
        assert len({*marks.values()}) == len(marks)


def test_a_step_is_a_bar_of_the_letters_of_its_parts() -> None:
    line = terminal.step_line(step(7, rollout=6.0, train=3.0, weights=1.0), 28)
    assert line == "step 7        10s RRRRRRTTTW"
    steps = [step(1, rollout=1.0), step(2, rollout=2.0), step(3, train=9.0)]
    assert terminal.step_lines(steps, 28) == [
        "step 3       9.0s TTTTTTTTT>",  # over twice the median
        "step 2       2.0s RRRRR",
        "step 1       1.0s RR",
    ]
    assert terminal.worst_line(steps[2]) == "longest in step 3: train 9.0s: rank 1"


@given(st.dictionaries(st.sampled_from(list(PARTS)), SECONDS), st.integers(28, 200), SECONDS)
def test_no_bar_is_wider_than_its_line(parts: dict[str, float], width: int, full_s: float) -> None:
    assert len(terminal.step_line(StepTime(1, 0.0, sum(parts.values()), parts, {}), width, full_s)) <= width


@given(st.fixed_dictionaries({name: COUNTS for name in terminal.GROUP_STATES}), st.integers(40, 200))
def test_groups_are_one_bar_with_a_legend_that_fits(counts: dict[str, int], width: int) -> None:
    bar, *legend = terminal.group_lines({**counts, "issued": sum(counts.values())}, width)
    assert len(bar) == width or not any(counts.values())
    assert max(map(len, legend)) <= width
    assert all(f"{counts[name]:,} {name.replace('_', ' ')}" in " ".join(legend) for name in counts)


def test_curves_have_their_first_and_newest_values() -> None:
    rows = [{"step": 1, "train/loss": 2.0, "eval/held-out": 0.25}, {"step": 2, "train/loss": "nan", "eval/s": 0.5}]
    rows.append({"step": 3, "train/loss": 1.0, "perf/tokens_per_sec": 12345.0})
    assert terminal.curve_lines(rows, 60) == [
        "loss              2.000 -> 1.000         █▁",
        "tokens/s          12,345 -> 12,345       ▁",
        "eval/held-out     0.250 -> 0.250         ▃",
        "eval/s            0.500 -> 0.500         ▅",
    ]
    assert terminal.curve_lines([], 60) == ["no step is trained yet"]


@pytest.mark.parametrize(
    "name", ["held-out", "a-b-c", "aime-2024", "math_500", "x", "reverse-digits-held-out", "step-2"]
)
def test_each_evaluation_set_has_one_curve_whatever_its_name(name: str) -> None:
    others = ["-truncated_ratio", "-ungraded_ratio", "-newer_weights_ratio", "-not_asked", "-pass@4", "/entropy"]
    row = {"step": 1, "eval/step": 1, f"eval/{name}": 0.5, **{f"eval/{name}{other}": 0.25 for other in others}}
    (line,) = terminal.curve_lines([row], 100)
    assert line.startswith(f"eval/{name}  ")


def test_processes_and_engines_say_what_they_are_and_why() -> None:
    observed = folded(
        ActorStarted(actor="rollout", node="n", pid=7),
        ActorExited(actor="rollout", node="n", pid=7, exit_code=-9, reason="killed by SIGKILL", restart_in_s=0.5),
        ActorStarted(actor="rollout", node="n", pid=8, restarts=1),
        ActorStarted(actor="engine.policy.0", node="n", pid=9),
        EngineStateChanged(
            engine="engine.policy.0",
            instance="rollout",
            old=EngineState.CURRENT,
            new=EngineState.PAUSED,
            version=3,
            reason="an update",
        ),
        ActorExited(actor="trainer", node="n", pid=5, exit_code=1, reason="out of memory " * 9, restart_in_s=None),
    )
    rows = dict(terminal.process_rows(observed.now(), 80, at=1065.0))
    assert rows["rollout"] == ("rollout", "up", "1m02s", "", "1", "")
    assert rows["engine.policy.0"] == ("engine.policy.0", "paused", "1m00s", "v3", "", "an update")
    assert rows["trainer"][:2] == ("trainer", "down")
    assert rows["trainer"][5].endswith("…")
    assert dict(terminal.process_rows(observed.now(), 80, at=1065.0, live=False))["rollout"][1] == "ended"
    assert terminal.detail_lines(observed.now(), "engine.policy.0", 1065.0)[-3:] == [
        "engine: version 3",
        "engine: since 1m00s ago",
        "engine: reason an update",
    ]


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (EngineLoad(samples=3), "3 samples"),
        (EngineLoad(samples=6, running=5, waiting=2, cache_usage=0.45), "5 running, 2 waiting, KV cache 45%"),
    ],
)
def test_an_engine_that_serves_says_its_load(load: EngineLoad, text: str) -> None:
    state = EngineStateChanged(
        engine="e", instance="r", old=EngineState.STARTING, new=EngineState.CURRENT, version=1, reason="verified"
    )
    known = folded(state).now()
    assert terminal.process_rows(known, 100, at=1001.0)[0][1][5] == "verified"
    known = folded(state, completed(0, last_sample=LastSample(engine="e", load=load))).now()
    assert terminal.process_rows(known, 100, at=1002.0)[0][1][5] == text
    assert terminal.process_rows(known, 100, at=1002.0, live=False)[0][1][5] == "verified"


@pytest.mark.parametrize("live", [True, False])
def test_a_stall_names_who_waits_for_what_while_the_run_goes_on(live: bool) -> None:
    observed = folded(*LOG, RunStalled(idle_s=300.0, waiting={"trainer": "its batch"}))
    lines = terminal.wait_lines(observed.now(), live=live)
    assert ("nothing happens: trainer waits for its batch" in lines) is live


def test_the_head_names_step_weights_and_the_end() -> None:
    observed = folded(*LOG)
    assert terminal.head_line(observed.now(), live=True) == "r: step 2 of 4; weights v0 (v3 announced); live"
    observed.apply(RunFinished(incarnation=1, steps=2, reason="all steps trained"), 99, 2000.0)
    assert terminal.head_line(observed.now(), live=False).endswith("; finished: all steps trained")
    assert terminal.head_line(observed.now(), live=False, problem="no bus").endswith("; no bus")
    assert terminal.progress_bar(observed, 22) == "[##########..........]"


def test_live_groups_come_before_those_that_ended() -> None:
    rows = terminal.group_rows(folded(*LOG).ledger())
    assert [cells[1] for _, cells in rows] == ["in flight", "dropped", "failed", "dropped"]
    assert len({key for key, _ in rows}) == len(rows)
