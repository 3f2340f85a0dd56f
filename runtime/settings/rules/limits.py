"""Time limits against each other: every pair where one must strike before the other, as one table.

`--check` applies the rows that have a setting to the user's values; docs/reference/limits.md is written from all rows,
and a test breaks each. A limit is named as the settings name it, or as module and constant; a constant is read from the
source of its module, so that no module is imported for it.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from runtime.bus.limits import BusLimits, StreamLimits
from runtime.settings.processes import ProcessSpec, longest_silence_s
from runtime.settings.reading.config import Config, Problem
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.tables.rollout import RolloutConfig
from runtime.settings.tables.run import BusConfig, RunConfig
from runtime.settings.topology import Topology

BUS_RESTART_S: Final = 5.0  # to kill a server of the bus, start it, and connect again
ANY: Final = "<name>"  # an entry of a table of tables
STRUCTS: Final = {
    "BusLimits": BusLimits(),
    "StreamLimits": StreamLimits(),
    "ProcessSpec": ProcessSpec(name="", command=()),
}
TABLES: Final[dict[str, type[Config]]] = {
    "bus": BusConfig,
    "run": RunConfig,
    "rollout": RolloutConfig,
    f"engines.{ANY}": EngineConfig,
}


class Term(NamedTuple):
    """A limit in seconds, by its name, and what is made of it."""

    name: str
    times: float = 1.0
    by: Callable[[float], float] = float

    def of(self, value: float) -> float:
        return self.times * self.by(value)

    @property
    def text(self) -> str:
        made = f"longest_silence_s(`{self.name}`)" if self.by is longest_silence_s else f"`{self.name}`"
        return made if self.times == 1.0 else f"{self.times:g} x {made}"


class Limit(NamedTuple):
    """One row: the sum on the left must be below the sum on the right, or at most equal."""

    less: tuple[Term, ...]
    more: tuple[Term, ...]
    why: str  # what goes wrong otherwise
    or_equal: bool = False

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.less + self.more

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms if _is_setting(term.name))

    def holds(self, value_of: Callable[[str], float]) -> bool:
        """Whether the row holds for the values that a function returns by name."""
        less, more = (sum(term.of(value_of(term.name)) for term in side) for side in (self.less, self.more))
        return less < more or (self.or_equal and less == more)


def _side(*terms: str | Term) -> tuple[Term, ...]:
    return tuple(term if isinstance(term, Term) else Term(term) for term in terms)


LIMITS: Final = (
    Limit(
        _side(Term("bus.unresponsive_after_s", by=longest_silence_s), "runtime.settings.rules.limits.BUS_RESTART_S"),
        _side("BusLimits.publish_timeout_s"),
        "A server of the bus that hangs must be killed and back before a publish gives up, which ends its actor.",
    ),
    Limit(
        _side(f"engines.{ANY}.first_token_after_s", f"engines.{ANY}.next_token_after_s"),
        _side("rollout.generate_timeout_s"),
        "An engine that hangs must be found and given up, after its last sign of life was awaited, before its "
        "requests end at their own limit, which ends the run.",
    ),
    Limit(
        _side("runtime.settings.processes.PROBE_EVERY_S"),
        _side("ProcessSpec.unresponsive_after_s"),
        "A server must be probed before it counts as unresponsive.",
    ),
    Limit(
        _side(Term("runtime.process.heartbeat.EVERY_S", 4)),
        _side("run.unresponsive_after_s"),
        "Several heartbeats must be lost before an actor is killed.",
    ),
    Limit(
        _side("runtime.process.heartbeat.STACKS_AFTER_S"),
        _side("run.unresponsive_after_s"),
        "The stacks of an event loop that stands still must be written before its process is killed.",
    ),
    Limit(
        _side(Term("runtime.node.claims.node_claim.RENEW_EVERY_S", 3)),
        _side("runtime.node.claims.node_claim.LIFETIME_S"),
        "Two lost renewals must not free a node's claim for a second daemon.",
    ),
    Limit(
        _side("runtime.node.claims.node_claim.RENEW_EVERY_S", "runtime.node.other_nodes.LOOK_EVERY_S"),
        _side("runtime.node.other_nodes.SILENT_AFTER_S"),
        "A node must have renewed its claim once more before it is called silent.",
    ),
    Limit(
        _side("runtime.node.other_nodes.SILENT_AFTER_S"),
        _side("runtime.node.claims.node_claim.LIFETIME_S"),
        "A silent node must be named before its claim expires: one that was not named counts as having left.",
    ),
    Limit(
        _side(Term("runtime.node.claims.home.RENEW_EVERY_S", 3)),
        _side("runtime.node.claims.home.LIFETIME_S"),
        "A disk that is slow twice must not give the lease of home to a second one.",
    ),
    Limit(
        _side(Term("runtime.bus.roster.RENEW_EVERY_S", 3)),
        _side("runtime.bus.roster.LIFETIME_S"),
        "Two lost renewals must not strike an actor from the roster.",
    ),
    Limit(
        _side(Term("runtime.bus.addresses.RENEW_EVERY_S", 3)),
        _side("runtime.bus.addresses.LIFETIME_S"),
        "Two lost renewals must not make a server unknown.",
    ),
    Limit(
        _side(Term("actors.rollout.engines.others.RENEW_EVERY_S", 2)),
        _side("actors.rollout.engines.others.LIFETIME_S"),
        "One lost renewal must not hide the engines of a rollout actor from the others.",
    ),
    Limit(
        _side(Term("actors.rollout.engines.ownership.CONFIRM_EVERY_S", 2)),
        _side("actors.rollout.engines.ownership.LIFETIME_S"),
        "One lost answer must not stop the calls of a rollout actor that still owns its engines.",
    ),
    Limit(
        _side(Term("BusLimits.attempt_timeout_s", 3)),
        _side("BusLimits.publish_timeout_s"),
        "A publish must try again after lost answers.",
    ),
    Limit(
        _side("BusLimits.publish_timeout_s"),
        _side("StreamLimits.duplicate_window_s"),
        "A publish that is repeated must not be stored twice for as long as that may happen.",
    ),
    Limit(
        _side(Term("BusLimits.pull_heartbeat_s", 2)),
        _side("BusLimits.pull_expires_s"),
        "A pull must hear of a lost server before it expires by itself.",
    ),
    Limit(
        _side("BusLimits.pull_expires_s"),
        _side("runtime.bus.nats.consumers.INACTIVE_S"),
        "A waiting reader must ask again before the server removes its consumer.",
    ),
    Limit(
        _side("runtime.bus.scoring.MAX_EXPIRES_S"),
        _side("runtime.bus.nats.consumers.INACTIVE_S"),
        "The same for an external reward worker, which chooses how long its pulls live.",
    ),
    Limit(
        _side("ProcessSpec.stop_timeout_s", Term("runtime.node.supervisor.supervision.TIER_RESERVE_S", 2)),
        _side("runtime.node.supervisor.supervision.STOP_WITHIN_S"),
        "The first tier must have its whole time to stop while the two later ones keep theirs.",
    ),
    Limit(
        _side("runtime.node.supervisor.supervision.STOP_WITHIN_S"),
        _side("runtime.node.daemon.STOP_DEADLINE_S"),
        "All processes must have been stopped in order before everything is killed.",
    ),
    Limit(
        _side("actors.buffer.actor.HALT_TIMEOUT_S"),
        _side("runtime.node.halting.ANSWER_S"),
        "`bin/halt` must wait until the buffer answers that it could not.",
    ),
    Limit(
        _side("actors.rollout.engines.weights.sync.ANSWER_S", "actors.rollout.engines.weights.sync.GATHER_S"),
        _side("actors.trainer.weights.syncs.PREPARE_TIMEOUT_S"),
        "A rollout actor that waits for its engines must answer before the trainer takes it for dead.",
    ),
    Limit(
        _side("actors.trainer.weights.broadcast.JOIN_TIMEOUT_S"),
        _side("actors.trainer.megatron.groups.COLLECTIVE_TIMEOUT_S"),
        "Engines that do not join must fail the weight sync before the other ranks' collective fails the trainer.",
    ),
    Limit(
        _side("runtime.http.asking.CONNECT_S", "runtime.http.asking.READ_S"),
        _side("runtime.http.asking.STALL_S"),
        "A fetch must have asked a second node before it gives a version up.",
    ),
)


def limit_problems(topology: Topology) -> Iterator[Problem]:
    """Yield a problem for each row that the settings break, at the setting that differs most from its default."""
    for row in LIMITS:
        for entry in _entries(topology, row):
            values = {name: _value(topology, name.replace(ANY, entry)) for name in row.settings}
            if row.settings and not row.holds(lambda name, values=values: values.get(name) or default_of(name)):
                yield _problem(row, values, entry)


def _entries(topology: Topology, row: Limit) -> tuple[str, ...]:
    """The entries that a row is for: engine pools without `urls`, or one for a row without a table of tables."""
    if not any(ANY in name for name in row.settings):
        return ("",)
    return tuple(name for name, engine in topology.engines.items() if not engine.urls)


def _problem(row: Limit, values: Mapping[str, float], entry: str) -> Problem:
    key = max(values, key=lambda name: abs(values[name] / default_of(name) - 1))
    shown = {term.name: values.get(term.name) or default_of(term.name) for term in row.terms}
    sides = [" + ".join(_shown(term, shown[term.name], entry) for term in side) for side in (row.less, row.more)]
    return Problem.of(
        key.replace(ANY, entry),
        values[key],
        f"must be such that {sides[0]} is {'at most' if row.or_equal else 'below'} {sides[1]}: "
        f"{row.why[0].lower()}{row.why[1:-1]}; its default is {default_of(key):g}",
    )


def _shown(term: Term, value: float, entry: str) -> str:
    name = term.name.rpartition(".")[2] if not _is_setting(term.name) else term.name.replace(ANY, entry)
    of = "the longest silence of " if term.by is longest_silence_s else f"{term.times:g} x " if term.times != 1 else ""
    return f"{of}{name} ({term.of(value):g} s)"


def default_of(name: str) -> float:
    """Return a limit in seconds as the settings or the code have it by default.

    Raises:
        AttributeError: a struct has none of that name.
        KeyError: a module has none.
    """
    place, _, last = name.rpartition(".")
    if place in STRUCTS:
        return float(getattr(STRUCTS[place], last))
    if _is_setting(name):
        (field,) = (field for field in msgspec.structs.fields(TABLES[place]) if field.name == last)
        return float(field.default)
    return _constants(place)[last]


def _is_setting(name: str) -> bool:
    return name.rpartition(".")[0] in TABLES


def _value(topology: Topology, key: str) -> float:
    found: Any = topology
    for part in key.split("."):
        found = cast("dict[str, Any]", found)[part] if isinstance(found, dict) else getattr(found, part)
    return float(found)


@cache
def _constants(module: str) -> dict[str, float]:
    """The constants of a module that are written as numbers, or as several numbers, of which the largest counts."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise KeyError(module)
    found: dict[str, float] = {}
    for line in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        try:
            found[name] = float(max(ast.literal_eval(each) for each in getattr(value, "elts", [value])))
        except (TypeError, ValueError):
            continue  # not written as a number
    return found


PAGE_HEAD: Final = """# Time limits against each other

Written by `bin/describe-settings` from `runtime/settings/rules/limits.py`; do not edit.

Where two limits run at the same time, one must strike first. Each row says which, and what goes wrong otherwise. A row
with a setting is applied to your values by `--check`; numbers are the defaults, in seconds. Other names are constants
of the code. What each limit does: [failure model](../understand/failure-model.md).

| must be below | this | otherwise |
|---|---|---|
"""


def limits_page() -> str:
    """Return the text of docs/reference/limits.md."""
    rows = [f"| {_cell(row.less)} | {_cell(row.more)} | {row.why} |\n" for row in LIMITS]
    return PAGE_HEAD + "".join(rows)


def _cell(terms: tuple[Term, ...]) -> str:
    total = sum(term.of(default_of(term.name)) for term in terms)
    return f"{' + '.join(term.text for term in terms)}: {total:g}"
