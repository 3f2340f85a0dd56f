"""Replay the samples of a dump through the filter, batching or the trainer, with other settings."""

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bin.entry import Screen, ended, override_hint, parser_of
from runtime.util.exit_codes import EXIT_OK
from runtime.util.import_path import command_name

if TYPE_CHECKING:
    from actors.filter.filters import ReplayedFilter
    from runtime.data.dumped_run import DumpedGroups
    from runtime.data.dumps import DumpedGroup
    from runtime.settings.topology import Topology

START = command_name("start-topology")
GROUPS_SHOWN = 12  # maximum number of group ids in a batch's text line

EPILOG = f"""--to filter   Print the verdicts of rollout.dynamic_filter on every group, and how many differ from the
              dumped ones.
--to batch    Print the batches that the buffer makes of the groups, with their rewards.
--to trainer  Train on the dump, as {START} TOPOLOGY --only trainer --load DUMP does. Further options
              are passed to it.

Another user may have written the topology.json of the dump. The command takes only keys of it that say what is
trained, and names the others in one line: functions, programs, addresses, secrets, places to read or write, and how
the run runs, such as numbers of processes. Set them with --set, or let them in with --trust, which prints them. Dumps
below run.dir that only you can write are your own.

exit codes: 0 printed; 2 the dump or the topology cannot be used; with --to trainer those of {START}"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args, rest = _parser().parse_known_args(argv)
    if rest and args.to != "trainer":
        _parser().error("\n".join([f"unrecognized arguments: {' '.join(rest)}", *override_hint(rest)]))
    from runtime.data.columns import DumpError
    from runtime.settings.reading.config import TopologyError  # imports NumPy, which --help does not need

    return ended(lambda: _train(args, rest) if args.to == "trainer" else _show(args), TopologyError, DumpError)


def _show(args: argparse.Namespace) -> int:
    Screen(sys.stdout).show_all(_filter(args) if args.to == "filter" else _batches(args))
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("replay", __doc__, EPILOG)
    add = parser.add_argument
    add("dump", metavar="DUMP", type=Path, help="Directory that run.dump_details wrote.")
    add(
        "topology",
        metavar="TOPOLOGY",
        type=Path,
        nargs="?",
        help="Topology file. By default the topology of the dumped run.",
    )
    add("--to", choices=["filter", "batch", "trainer"], required=True, help="What the samples are replayed through.")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="Override a key of the topology. Repeatable.")
    add("--trust", action="store_true", help="Also take keys of a stranger's dump that are not harmless.")
    add("--json", action="store_true", help="Print JSON: one object for the filter, one line for each batch.")
    return parser


def _topology_file(args: argparse.Namespace) -> Path:
    from runtime.data.dump_files import TOPOLOGY_FILE

    return args.topology or args.dump / TOPOLOGY_FILE


def _opened(args: argparse.Namespace) -> "tuple[Topology, DumpedGroups, ReplayedFilter]":
    """Open the topology, the dump and the filter."""
    from actors.filter.filters import ReplayedFilter
    from runtime.data.dumped_run import DumpedGroups
    from runtime.settings.load import load_topology, without_rules
    from runtime.settings.reading.config import Problem, TopologyError
    from runtime.settings.reading.toml import load_tables
    from runtime.settings.topology import Topology
    from runtime.util.formatting import show

    groups, file = DumpedGroups(args.dump), _topology_file(args)
    if _asks(args, args.set):
        loaded = without_rules(load_tables(file, args.set, Topology, foreign=True))
    else:
        loaded = load_topology(file, args.set)
    topology, key = loaded.topology, "rollout.dynamic_filter"
    name = topology.rollout.dynamic_filter
    try:
        return topology, groups, ReplayedFilter(name)
    except ValueError as error:  # PluginError is a subclass
        problem = Problem(key=key, value=show(name), message=str(error), file=loaded.loaded.origin(key))
        raise TopologyError([problem]) from error


def _asks(args: argparse.Namespace, overrides: list[str]) -> bool:
    """Say which keys of a stranger's topology are left out, or let in. Return whether only harmless ones are taken."""
    from runtime.data.dump_files import TOPOLOGY_FILE
    from runtime.settings.reading.foreign import is_own, left_out_line, let_in_line
    from runtime.settings.reading.toml import SET, load_tables
    from runtime.settings.tables.run import RunConfig
    from runtime.settings.topology import Topology

    path = _topology_file(args)
    dump, file = (Path(os.path.realpath(place)) for place in (args.dump, path))
    if dump not in file.parents:
        return False
    loaded = load_tables(path, overrides, Topology, foreign=True)
    is_set = loaded.origin("run.dir") == SET
    runs = loaded.tables["run"]["dir"] if is_set else RunConfig(name="any").dir
    if is_own(args.dump, Path(runs), [TOPOLOGY_FILE]):
        return False
    if loaded.left_out:
        line = let_in_line if args.trust else left_out_line
        Screen(sys.stderr).show(line(str(path), loaded.left_out))
    return not args.trust


def _filter(args: argparse.Namespace) -> Iterator[str]:
    _, groups, judge = _opened(args)
    verdicts, reasons, changed = Counter[str](), Counter[tuple[str, str]](), list[dict[str, Any]]()
    for group in groups:
        verdict, before = judge.judge(group.completed(), group), group.samples[0].verdict
        verdicts[verdict.outcome] += 1
        if verdict.reason is not None:
            reasons[verdict.outcome, verdict.reason] += 1
        if before is not None and before != verdict.outcome:
            changed.append({"group_id": group.group_id, "was": str(before), "is": str(verdict.outcome)})
    reasons = [
        {"outcome": outcome, "reason": reason, "groups": count} for (outcome, reason), count in reasons.most_common()
    ]
    if args.json:
        found = {
            "filter": judge.name,
            "groups": len(groups),
            "verdicts": verdicts,
            "reasons": reasons,
            "changed": changed,
        }
        yield json.dumps(found)
        return
    yield f"filter {judge.name}: {len(groups)} groups of {args.dump}"
    for outcome, count in verdicts.most_common():
        yield f"  {outcome:8}{count:6}"
        yield from (f"  {'':8}{row['groups']:6}  {row['reason']}" for row in reasons if row["outcome"] == outcome)
    yield f"  changed since the dump: {len(changed)}"


def _batches(args: argparse.Namespace) -> Iterator[str]:
    from actors.buffer.deciding.replayed import EXHAUSTED, ReplayedBuffer
    from messages import GroupCompleted

    topology, groups, judge = _opened(args)

    unjudged: dict[int, DumpedGroup] = {}

    def completed() -> Iterator[GroupCompleted]:
        for group in groups:
            unjudged[group.group_id] = group
            yield group.completed()

    def verdict_of(group: GroupCompleted) -> tuple[str, str | None]:
        verdict = judge.judge(group, unjudged.pop(group.group_id, None))
        return str(verdict.outcome), verdict.reason

    buffer = ReplayedBuffer(topology, completed(), verdict_of)
    for batch in buffer.batches():
        ids, rewards = [group.group_id for group in batch.groups], batch.rewards
        mean = statistics.fmean(rewards) if rewards else None
        std = statistics.pstdev(rewards) if rewards else None
        if args.json:
            yield json.dumps({"step": batch.step, "groups": ids, "reward_mean": mean, "reward_std": std})
            continue
        shown = ", ".join(map(str, ids[:GROUPS_SHOWN])) + (", ..." if len(ids) > GROUPS_SHOWN else "")
        rewarded = "no rewards" if mean is None else f"reward {mean:.3f}, std {std:.3f}"
        yield f"step {batch.step + 1}: {rewarded}, {len(ids)} groups: {shown}"
    if not args.json:
        state = buffer.state
        yield f"{state.trained} of {len(groups)} groups in {state.trained_steps} batches"
        for what, tally in (("dropped", state.dropped), ("failed", state.failed)):
            counts = sorted((reason, count) for reason, count in tally.items() if reason != EXHAUSTED)
            yield from (f"  {what} {count}: {reason}" for reason, count in counts)


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from bin.start_topology import main as start
    from runtime.settings.load import load_topology
    from runtime.settings.reading.toml import load_tables
    from runtime.settings.topology import Topology

    path = _topology_file(args)
    name = load_tables(path, (), Topology, foreign=True).tables.get("run", {}).get("name", "dump")
    own = [f"run.name={name}-replay", "run.dump_details=none", "eval=[]", *args.set]  # a dump has no evaluations
    load = partial(load_topology, foreign=_asks(args, [*own, "run.only=trainer", f"run.load={args.dump}"]))
    words = [str(path), "--only", "trainer", "--load", str(args.dump)]
    words += [word for item in own for word in ("--set", item)]
    return start([*words, *(["--json"] if args.json else []), *rest], load=load)
