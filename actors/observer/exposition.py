"""What Prometheus gets of a run: families of samples with bounded labels, folded from the log, and their text. Pure.

Labels name processes, engines, states and reasons of the run, never a prompt group. A reason gives at most one
word, the code with which it begins; a user's filter chooses its own. Counters come from the log alone, so a process
that starts again continues with the same numbers.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from actors.observer.observed import Observed
from messages import EngineState

OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "physarum_"
COUNTER, GAUGE = "counter", "gauge"
RUN_STATES: Final = ("running", "finished", "failed", "stopped")
OTHER: Final = "other"  # label of reasons that are free text, or too many
MAX_REASONS: Final = 20  # of one outcome
MAX_SAMPLES: Final = 2_000  # of one family
CODE: Final = re.compile(r"([a-z]+(?:_[a-z]+)*)(?:_-?[0-9.]+)?(?=:|$)")  # a reason in code, without its number

Labels = Mapping[str, str]


class Family(NamedTuple):
    """Samples of one metric."""

    name: str  # without the prefix and, for a counter, without `_total`
    kind: str  # COUNTER or GAUGE
    help: str  # without line breaks, quotes and backslashes
    samples: list[tuple[Labels, float]]


def families_of(observed: Observed) -> Iterator[Family]:
    """Yield what the log says of a run as of its newest event."""
    now, ledger = observed.now(), observed.ledger()
    yield from _of_the_run(observed, now)
    yield from _of_groups(ledger)
    yield from _of_attempts(observed)
    yield from _of_processes(observed, now)
    yield from _of_engines(now)


def _of_the_run(observed: Observed, now: Mapping[str, Any]) -> Iterator[Family]:
    state = now["ended"].partition(":")[0] or RUN_STATES[0]
    states: list[tuple[Labels, float]] = [({"state": each}, float(each == state)) for each in RUN_STATES]
    yield Family("run_state", GAUGE, "1 for the state of the run, 0 for the others.", states)
    yield _one("planned_steps", GAUGE, "Train steps that the run is to do; 0: unknown.", now["num_steps"])
    yield _one("train_steps", COUNTER, "Train steps done.", now["step"])
    yield _one("last_event_timestamp_seconds", GAUGE, "Unix time of the newest event of the log.", now["time"])
    yield _one("log_sequence", GAUGE, "Log sequence of the newest event.", now["seq"])
    yield _one("log_problems", GAUGE, "Reasons why events are missing here.", len(now["problems"]))
    yield Family(
        "step_metric",
        GAUGE,
        "Newest value of each metric of train steps, by its name in docs/reference/metrics.md.",
        [({"metric": name}, value) for name, value in sorted(observed.metrics().items())],
    )
    yield Family(
        "time_seconds",
        GAUGE,
        "Wall time of all train steps so far, by the part that it was spent in (bin/watch RUN --time).",
        [({"part": name}, seconds) for name, seconds in sorted(observed.account.totals.items())],
    )
    yield Family(
        "weights_version",
        GAUGE,
        "Newest weight version.",
        [
            ({"place": "announced"}, now["weights"]["announced"]),
            ({"place": "engines"}, now["weights"]["held"]),
        ],
    )
    for name, text in (
        ("checkpoints", "Checkpoints saved."),
        ("stalls", "Times that no event was logged for long."),
        ("dead_letters", "Messages that could not be used."),
    ):
        yield _one(name, COUNTER, text, observed.counts.totals.get(name, 0.0))
    yield _one("checkpoint_step", GAUGE, "Train steps in the newest checkpoint.", observed.counts.checkpoint_step)


def _of_groups(ledger: Mapping[str, Any]) -> Iterator[Family]:
    books = ledger["books"]
    yield _one("groups_issued", COUNTER, "Prompt groups issued.", books["issued"])
    states: list[tuple[Labels, float]] = [({"state": name}, books[name]) for name in sorted({*books} - {"issued"})]
    yield Family("groups", GAUGE, "Prompt groups by state; they add up to the issued ones.", states)
    ended = [
        ({"outcome": outcome, "reason": reason}, float(count))
        for outcome in ("dropped", "failed")
        for reason, count in _by_code(ledger[outcome]).items()
    ]
    yield Family("groups_lost", COUNTER, "Prompt groups that ended without being trained, by reason.", [*ended])


def _of_attempts(observed: Observed) -> Iterator[Family]:
    for name, text in (
        ("groups_completed", "Attempts at a prompt group whose samples are all generated and scored."),
        ("rollout_seconds", "Seconds of rollout, slot to last token, added over the attempts of groups_completed."),
        ("reward_seconds", "Seconds from last token to last score, added over the attempts of groups_completed."),
        ("response_tokens", "Tokens of the responses of the attempts of groups_completed."),
    ):
        yield _one(name, COUNTER, text, observed.counts.totals.get(name, 0.0))
    samples: list[tuple[Labels, float]] = [({"status": name}, n) for name, n in sorted(observed.counts.samples.items())]
    yield Family("samples", COUNTER, "Samples of the attempts of groups_completed, by how they ended.", samples)


def _of_processes(observed: Observed, now: Mapping[str, Any]) -> Iterator[Family]:
    known: list[tuple[Labels, float]] = [
        ({"process": one["name"], "node": one["node"]}, float(one["is_up"])) for one in now["processes"]
    ]
    yield Family("process_up", GAUGE, "1 if the process runs, as its node daemon last reported.", known)
    restarts = [(labels, observed.counts.restarts.get(labels["process"], 0.0)) for labels, _ in known]
    yield Family("process_restarts", COUNTER, "Restarts of the process after it ended by itself.", restarts)
    blocked = [(labels, observed.counts.blocked.get(labels["process"], 0.0)) for labels, _ in known]
    text = "Seconds in which a call of a second or more blocked the event loop of the process."
    yield Family("event_loop_blocked_seconds", COUNTER, text, blocked)


def _of_engines(now: Mapping[str, Any]) -> Iterator[Family]:
    engines = [({"engine": one["name"], "pool": _pool_of(one["name"])}, one) for one in now["engines"]]
    yield Family(
        "engine_state",
        GAUGE,
        "1 for the state of the engine, 0 for the others.",
        [
            ({**labels, "state": str(state)}, float(one["state"] == state))
            for labels, one in engines
            for state in EngineState
        ],
    )
    for name, key, text in (
        ("engine_weights_version", "version", "Weight version that the engine holds."),
        ("engine_update_seconds", "update_s", "Seconds of the engine's newest weight update."),
    ):
        yield Family(name, GAUGE, text, [(labels, one[key]) for labels, one in engines])
    for name, key, text in (
        ("engine_samples", "samples", "Samples in flight at the engine when it ended a group last."),
        ("engine_running_requests", "running", "Requests that the engine runs, as it reported then."),
        ("engine_waiting_requests", "waiting", "Requests in the engine's queue, as it reported then."),
        ("engine_cache_usage", "cache_usage", "Share of the engine's KV cache in use, as it reported then."),
    ):
        yield Family(name, GAUGE, text, [(labels, float(one[key])) for labels, one in engines if one["load_at"]])


def rendered(families: Iterable[Family], labels: Labels, *, openmetrics: bool) -> str:
    """Return the text of families in the format of OpenMetrics, or in that of Prometheus.

    Args:
        families: of distinct names.
        labels: of every sample.
        openmetrics: whether in the first format.
    """
    lines: list[str] = []
    for family in families:
        name = PREFIX + family.name
        sample = f"{name}_total" if family.kind == COUNTER else name
        header = name if openmetrics else sample
        lines += [f"# HELP {header} {family.help}", f"# TYPE {header} {family.kind}"]
        for own, value in family.samples[:MAX_SAMPLES]:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {**labels, **own}.items())
            lines.append(f"{sample}{{{pairs}}} {_spelled(value)}")
    return "\n".join([*lines, *(["# EOF"] if openmetrics else []), ""])


def _one(name: str, kind: str, text: str, value: float) -> Family:
    return Family(name, kind, text, [({}, value)])


def _by_code(counts: Mapping[str, int]) -> dict[str, int]:
    """Add up counts by reason under the code that each reason begins with."""
    found: dict[str, int] = {OTHER: 0}
    for reason, count in counts.items():
        match = CODE.match(reason)
        code = OTHER if match is None else match[1]
        if code not in found and len(found) > MAX_REASONS:
            code = OTHER
        found[code] = found.get(code, 0) + count
    return found


def _pool_of(engine: str) -> str:
    parts = engine.split(".")
    return parts[1] if len(parts) > 2 else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _spelled(value: float) -> str:
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else "+Inf" if number > 0 else "-Inf"
