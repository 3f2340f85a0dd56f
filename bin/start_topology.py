"""Start the run that a topology file describes, or resume it, and follow it to its end."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import msgspec

from actors.processes import process_specs
from bin.entry import Screen, WrongInput, command_path, ended, override_hint, parser_of
from runtime.data.data_files import DataError
from runtime.settings.job_system import AUTO_NODE, NoNode, node_of_job
from runtime.settings.load import LoadedTopology, load_topology
from runtime.settings.placement import home_node
from runtime.settings.plan import draw, plan_of
from runtime.settings.reading.config import Problem, TopologyError
from runtime.settings.reading.hints import flag_hint
from runtime.settings.reading.toml import shipped_topologies
from runtime.settings.topology import Topology
from runtime.util.exit_codes import EXIT_FAILED, EXIT_OK
from runtime.util.imports import collecting_nothing, without
from runtime.util.secrets import without_logins

if TYPE_CHECKING:
    from runtime.node.checks.context import Checked
    from runtime.node.planning import SpecsOf

    Load = Callable[[Path, Sequence[str]], LoadedTopology]

CHECKS = "Check whether the run can start on this machine"
PLANS = "Print objective, processes of each node and sizes of streams"
START = """Start the run that a topology file describes, or resume it, and follow it to its end.

The run directory runs/<run.name>/ has the resolved topology, logs, checkpoints, metrics.jsonl and the bus's store."""
DESCRIPTIONS = {"start": START, "check": f"{CHECKS}. With --node on all nodes, compare them.", "plan": f"{PLANS}."}
EPILOG = """exit codes: 0 finished, 1 the run failed, 2 wrong input, 130 stopped by Ctrl-C. After Ctrl-C the same
command resumes the run; a second Ctrl-C ends it without cleanup."""


def main(
    argv: list[str] | None = None,
    *,
    verb: str = "start",
    specs_of: "SpecsOf | None" = None,
    load: "Load" = load_topology,
) -> int:
    """Run the command and return its exit code.

    Args:
        argv: the arguments; by default those of the process.
        verb: "start", "check" or "plan".
        specs_of: returns the process specs of a node; by default `actors.processes.process_specs`.
        load: loads a topology file with overrides.
    """
    args = _parsed(argv, verb)
    return ended(lambda: _work(args, specs_of or process_specs, load), TopologyError, DataError)


def check(argv: list[str]) -> int:
    """Run the verb `check`, which stands for the option of that name."""
    return main(argv, verb="check")


def plan(argv: list[str]) -> int:
    """Run the verb `plan`, which stands for the option of that name."""
    return main(argv, verb="plan")


def _work(args: argparse.Namespace, specs_of: "SpecsOf", load: "Load") -> int:
    loaded = load(args.topology, [*args.set, *_half(args)])
    if args.plan:
        return _plan(loaded, specs_of, args)
    if args.download:
        return _download(loaded)
    return _check(loaded, args) if args.check else _start(loaded, args, specs_of)


def _parsed(argv: list[str] | None, verb: str) -> argparse.Namespace:
    """Parse the arguments. For an unknown option of another project, the error names its replacement."""
    parser = _parser(verb)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("--"))
        meant = [f"{flag}: {text}" for flag in flags if (text := flag_hint(flag)) is not None]
        remedy = ["Set keys in the topology file, or override one with --set KEY=VALUE."] if meant else []
        lines = [f"unrecognized arguments: {' '.join(unknown)}", *meant, *(override_hint(unknown) or remedy)]
        parser.error("\n".join(lines))
    return args


def _parser(verb: str) -> argparse.ArgumentParser:
    shipped = f"shipped topologies: {', '.join(shipped_topologies())}"
    command = "start-topology" if verb == "start" else verb
    parser = parser_of(command, DESCRIPTIONS[verb], f"{fill(shipped, 110, break_on_hyphens=False)}\n\n{EPILOG}")
    add = parser.add_argument

    def choose(name: str, text: str) -> None:  # an option that says what is done; a verb says it too
        if verb == "start":
            add(f"--{name}", action="store_true", help=text)
        parser.set_defaults(**{name: name == verb})

    add("topology", type=Path, help="Topology file, or the name of a shipped one, such as laptop.")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Override a key, such as train.num_steps=5. Repeatable.",
    )
    choose("check", f"{CHECKS}, and exit. With --node on all nodes, compare them.")
    add("--strict", action="store_true", help="With --check: refuse what is a note otherwise.")
    add("--elsewhere", action="store_true", help="With --check: skip the checks that need the machine of the run.")
    choose("download", "Download the models that are named as on the hub, and exit.")
    choose("plan", f"{PLANS}, and exit.")
    add(
        "--node",
        metavar="NAME",
        help="Name of this machine's node in the topology. With auto, the n-th task of srun, or the n-th pod of an "
        "indexed Job, is the n-th node.",
    )
    add("--join", type=Path, metavar="FILE", help="Join file of the run, for a node without the run directory.")
    add(
        "--take-over",
        action="store_true",
        help="Become the home node although another machine holds its lease. Only if that machine is gone for certain.",
    )
    add(
        "--only",
        choices=["rollout", "trainer"],
        help="Run only generation, without training, or only training, on a dump.",
    )
    add("--load", metavar="DIR", help="Directory of the dump for --only trainer; run.dump_details writes dumps.")
    choose("json", "Print one JSON line on standard output, and everything else on standard error.")
    add("--fresh", nargs="?", const="", metavar="RUN", help="Start over. RUN names the existing run to delete.")
    return parser


def _half(args: argparse.Namespace) -> list[str]:
    """Convert --only and --load into overrides."""
    if args.elsewhere and not args.check:
        raise WrongInput("--elsewhere needs --check")
    if args.strict and not args.check:
        raise WrongInput("--strict needs --check")
    if args.load is not None and args.only != "trainer":
        raise WrongInput("--load DIR needs --only trainer")
    if args.only == "trainer" and args.load is None and not any(item.startswith("run.load=") for item in args.set):
        raise WrongInput("--only trainer needs a dump: name its directory with --load DIR")
    given = {"run.only": args.only, "run.load": args.load}
    return [f"{key}={value}" for key, value in given.items() if value is not None]


def _node_of(topology: Topology, wanted: str | None) -> str:
    nodes = topology.nodes
    if wanted == AUTO_NODE:
        try:
            return node_of_job(os.environ, tuple(nodes))
        except NoNode as error:
            raise WrongInput(f"--node auto: {error}") from error
    if wanted is not None and wanted not in nodes:
        raise WrongInput(f"The topology has no node {wanted!r}. Choose one with --node: {', '.join(nodes)}")
    return wanted or home_node(topology)


def _ready(loaded: LoadedTopology, args: argparse.Namespace, screen: Screen, coming: Collection[str] = ()) -> Topology:
    """Check everything that can refuse a start on this machine, and return the topology to start.

    --check and a start both use it, so they refuse the same topologies.

    Args:
        loaded: the topology.
        args: of the command.
        screen: for notes.
        coming: settings whose files come from home at a start.
    """
    from runtime.node.checks.hub import hub_models, with_cached
    from runtime.node.claims.claim import RunClaimed
    from runtime.node.claims.rundir import RunRefused, check_start

    loaded = with_cached(loaded, lambda found: screen.show(f"note: {found}"))
    node = _node_of(loaded.topology, args.node)
    checked = _checked(loaded, screen, node=node, fresh=args.fresh is not None, coming=coming)
    _show_notes(checked.notes, args, screen, checked.problems)
    if any(hub_models(loaded)):  # the model must be downloaded first: further checks are not possible
        return loaded.topology
    topology = _fitted(
        (loaded if any(key.startswith(("data.", "eval.")) for key in coming) else _counted(loaded, screen)).topology,
        screen,
    )
    try:
        check_start(topology, args.fresh, node, join=args.join, take_over=args.take_over)
    except RunRefused as error:
        if len(topology.nodes) > 1 and node == home_node(topology) and not isinstance(error.__cause__, RunClaimed):
            raise TopologyError([Problem(key="", message=str(error))]) from error  # it refuses all nodes
        raise WrongInput(str(error)) from error
    return topology


def _show_notes(
    notes: Sequence[str], args: argparse.Namespace, screen: Screen, problems: tuple[Problem, ...] = ()
) -> None:
    """Show notes. Raise TopologyError if there are problems; with --strict notes are problems too."""
    if args.strict:
        problems, notes = (*problems, *(Problem(key="", message=f"{note} (--strict)") for note in notes)), ()
    for note in notes:
        screen.show(f"note: {note}")
    if problems:
        raise TopologyError(problems)


def _checked(
    loaded: LoadedTopology,
    screen: Screen,
    *,
    node: str | None = None,
    fresh: bool = False,
    elsewhere: bool = False,
    coming: Collection[str] = (),
) -> "Checked":
    """Run the pre-start checks in a separate process that can be killed, since they run users' code."""
    from runtime.node.checks.apart import Doing, apart
    from runtime.node.checks.context import CheckContext, Checked

    def work(doing: Doing) -> Checked:
        with collecting_nothing(), without("rich"):  # structlog would load it, for a terminal
            from actors.preflight import preflight  # imports NumPy and users' modules, which --help does not need

        context = CheckContext(loaded, node, fresh=fresh, elsewhere=elsewhere, coming=coming, doing=doing)
        return preflight(context)

    return apart(loaded, work, Checked, screen.show)


def _check(loaded: LoadedTopology, args: argparse.Namespace) -> int:
    file = loaded.loaded.files[-1]
    if not args.elsewhere:
        return _check_nodes(loaded, args, file) if _compares(loaded.topology, args) else _check_here(loaded, args, file)
    checked = _checked(loaded, Screen(sys.stderr), elsewhere=True)
    _show_notes(checked.notes if args.strict else (), args, Screen(sys.stderr), checked.problems)
    note = "valid, except for what only the machine of the run can show; not checked"
    Screen(sys.stdout).show(f"{file}: {note}: {'; '.join(checked.left_out)}")
    return EXIT_OK


def _compares(topology: Topology, args: argparse.Namespace) -> bool:
    """Return whether a check compares this machine with those of the other nodes: they meet on the bus of home."""
    return args.node is not None and len(topology.nodes) > 1 and topology.bus.url is None


def _check_here(loaded: LoadedTopology, args: argparse.Namespace, file: Path) -> int:
    topology = _ready(loaded, args, Screen(sys.stderr))
    Screen(sys.stdout).show(f"{file}: valid; the run can start on this machine")
    if len(topology.nodes) > 1:
        from runtime.node.checking import questions  # imports the bus, which other checks do not need

        for line in questions(topology, _node_of(topology, args.node)):
            Screen(sys.stdout).show(f"not checked: {line}")
    return EXIT_OK


def _check_nodes(loaded: LoadedTopology, args: argparse.Namespace, file: Path) -> int:
    """Check this machine, and compare it with the machines of the other nodes, on which the same command runs."""
    from runtime.node.checking import check_nodes, questions
    from runtime.node.claims.rundir import RunRefused

    screen, node = Screen(sys.stderr), _node_of(loaded.topology, args.node)
    problems: tuple[Problem, ...] = ()
    coming = _coming(loaded, node)
    try:
        topology = _ready(loaded, args, screen, coming)
    except TopologyError as error:
        topology, problems = loaded.topology, error.problems
        if node == home_node(topology) and _lacks_its_bus(node, problems):
            raise
        for problem in problems:
            screen.show(f"this node cannot take part: {problem}")
    try:
        answer = check_nodes(topology, node, problems, join=args.join, coming=coming, show=screen.show)
    except RunRefused as error:
        raise WrongInput(str(error)) from error
    out = Screen(sys.stdout)
    out.show_all(answer.seen)
    if answer.missing:
        screen.show_all(answer.missing)
        screen.show_all(f"not checked: {line}" for line in questions(topology, node))
    if answer.refusals:
        raise WrongInput("\n".join(answer.refusals))
    if answer.missing:
        return EXIT_FAILED
    out.show(f"{file}: valid; the run can start on {', '.join(topology.nodes)}")
    return EXIT_OK


def _lacks_its_bus(home: str, problems: Sequence[Problem]) -> bool:
    """Return whether home cannot start the bus on which it would report its problems to the other nodes."""
    return any(problem.key in ("bus.port", "bus.url", f"nodes.{home}.address") for problem in problems)


def _plan(loaded: LoadedTopology, specs_of: "SpecsOf", args: argparse.Namespace) -> int:
    """Draw the plan, even if a start here would be refused; print the reasons as notes."""
    screen = Screen(sys.stderr)
    try:
        loaded = _counted(loaded, screen)
    except (DataError, TopologyError) as error:
        screen.show(f"note: the number of steps of train.num_epoch is unknown here: {error}")
    topology = loaded.topology
    if topology.run.load is not None and Path(topology.run.load).exists():
        topology = _fitted(topology, screen)
    run_dir = Path(topology.run.dir) / topology.run.name
    specs = {name: specs_of(topology, name, run_dir) for name in topology.nodes}
    Screen(sys.stdout).show_all(draw(topology, plan_of(topology, specs)).split("\n"))
    _show_memory(topology)
    _show_files(topology)
    here = f"here as node {_node_of(topology, args.node)}" if len(topology.nodes) > 1 else "here"
    try:
        _ready(loaded, args, screen)
    except (TopologyError, WrongInput, DataError) as error:
        for line in str(error).splitlines():
            screen.show(f"note: the run cannot start {here}: {line}")
    return EXIT_OK


def _show_memory(topology: Topology) -> None:
    """Print the memory of a trainer rank on the CPU and the disk of copies of checkpoints, if the config is here."""
    copies = topology.train.checkpoint_copies > 1
    if topology.run.only == "rollout" or (topology.trainer.device != "cpu" and not copies):
        return
    from actors.trainer import checkpoint_copies
    from actors.trainer.models.config import trained_model  # reads models, which other commands do not need
    from actors.trainer.models.memory import checkpoint_bytes, described

    try:
        model = trained_model(topology)
        if topology.trainer.device == "cpu":
            Screen(sys.stdout).show(described(topology, model))
        if copies:
            Screen(sys.stdout).show(checkpoint_copies.described(topology, checkpoint_bytes(topology, model)))
    except (OSError, ValueError):  # `_ready` prints the reason
        return


def _show_files(topology: Topology) -> None:
    """Print which files of home other nodes fetch if they lack them."""
    if len(topology.nodes) == 1:
        return
    from runtime.node.run_files import needed_on, sizes_of  # imports the bus, which other commands do not need

    for node in topology.nodes:
        sizes = {} if node == home_node(topology) else sizes_of(needed_on(topology, node))
        if sizes:
            named = ", ".join(f"{key} ({each})" for key, each in sizes.items())
            Screen(sys.stdout).show(f"  files    {node} fetches from home what it lacks: {named}")


def _counted(loaded: LoadedTopology, screen: Screen) -> LoadedTopology:
    """Replace train.num_epoch by train.num_steps. Reads all data if num_epoch is set."""
    if loaded.topology.train.num_epoch is None:
        return loaded
    from runtime.node.checks.apart import Doing, apart

    def work(doing: Doing) -> Topology:
        from actors.buffer.prompts.source import count_steps

        return count_steps(loaded.topology, doing)

    return msgspec.structs.replace(loaded, topology=apart(loaded, work, Topology, screen.show))


def _fitted(topology: Topology, screen: Screen) -> Topology:
    """Limit train.num_steps to the number of steps that the dump has groups for, if training on a dump."""
    if topology.run.load is None:
        return topology
    from runtime.data.dumped_run import fitted  # imports NumPy, which other commands do not need

    shorter = fitted(topology)
    if shorter.train.num_steps < topology.train.num_steps:
        screen.show(f"note: {topology.run.load} has groups for {shorter.train.num_steps} train steps only")
    return shorter


def _import_ahead() -> None:
    """Import the node daemon before the checks, whose forked process needs most of its modules too."""
    with suppress(ImportError), collecting_nothing(), without("rich"):  # the checks name a missing package
        import_module("runtime.node.start")


def _start(loaded: LoadedTopology, args: argparse.Namespace, specs_of: "SpecsOf") -> int:
    screen = Screen(sys.stderr if args.json else sys.stdout)
    problems: tuple[Problem, ...] = ()
    _import_ahead()
    try:
        loaded = _with_files(loaded, args, screen)
        topology = _ready(loaded, args, screen)
        topology = _downloaded(msgspec.structs.replace(loaded, topology=topology), args, screen)
    except TopologyError as error:
        topology, problems = loaded.topology, error.problems
        node = _node_of(topology, args.node)
        if node == home_node(topology) and (len(topology.nodes) == 1 or _lacks_its_bus(node, problems)):
            raise
        for problem in problems:
            screen.show(f"this node cannot take part: {problem}")

    from actors.trainer.checkpoints import kept_of  # imports models, which other commands do not need
    from runtime.node.planning import StartOptions  # imports the bus, which other commands do not need
    from runtime.node.start import RunRefused, start

    if any(without_logins(override) != override for override in args.set):
        screen.show("note: every user of this machine can see a password on a command line: use bus.credentials")
    options = StartOptions(
        node=_node_of(topology, args.node),
        take_over=args.take_over,
        fresh=args.fresh,
        command=_command_of(args),
        bus_login=loaded.bus_login,
        join=args.join,
        problems=problems,
    )
    try:
        end = start(
            topology,
            options,
            specs_of=specs_of,
            kept_of=kept_of,
            show=screen.show,
            rewrite=screen.rewrite if screen.can_rewrite else None,
        )
    except RunRefused as error:
        raise WrongInput(str(error)) from error
    if args.json:
        Screen(sys.stdout).show(end.result_json)
    return end.exit_code


def _coming(loaded: LoadedTopology, node: str) -> tuple[str, ...]:
    """Return the settings whose files this node lacks, and fetches from home at a start."""
    if len(loaded.topology.nodes) == 1 or node == home_node(loaded.topology):
        return ()
    from runtime.node.run_files import lacking  # imports the bus, which other commands do not need

    return tuple(each.key for each in lacking(loaded, node))


def _with_files(loaded: LoadedTopology, args: argparse.Namespace, screen: Screen) -> LoadedTopology:
    """Fetch the files that this node lacks, and return the topology with their paths. Raises TopologyError."""
    node = _node_of(loaded.topology, args.node)
    if not _coming(loaded, node):
        return loaded
    from runtime.node.planning import StartOptions
    from runtime.node.start import RunRefused, with_files_from_home

    options = StartOptions(node=node, command="", bus_login=loaded.bus_login, join=args.join, fresh=args.fresh)
    try:
        return with_files_from_home(loaded, options, screen.show)
    except RunRefused as error:
        raise WrongInput(str(error)) from error


def _downloaded(loaded: LoadedTopology, args: argparse.Namespace, screen: Screen) -> Topology:
    """Download missing models, and repeat all checks with them. Return the topology with local model paths."""
    from runtime.node.checks.hub import NotOnHub, hub_models, with_downloaded

    if not any(hub_models(loaded)):
        return loaded.topology
    try:
        return _ready(with_downloaded(loaded, screen.show), args, screen)
    except NotOnHub as error:
        raise WrongInput(str(error)) from error


def _download(loaded: LoadedTopology) -> int:
    """Bring the models with hub names into the local cache, where a start finds them without a network."""
    from runtime.node.checks.hub import NotOnHub, hub_models, with_cached, with_downloaded

    screen = Screen(sys.stdout)
    try:
        if not any(hub_models(loaded)):
            screen.show("the topology names no model as on the hub")
        with_downloaded(with_cached(loaded, screen.show), screen.show)
    except NotOnHub as error:
        raise WrongInput(str(error)) from error
    return EXIT_OK


def _command_of(args: argparse.Namespace) -> str:
    """The command that resumes this run, from any directory. Logins are masked: the user must enter them again."""
    here = Path.cwd()
    words = [*command_path("start-topology", here), str(args.topology)]
    for override in args.set:
        words += ["--set", without_logins(override)]
    for option in ("node", "join", "only", "load"):
        value = getattr(args, option)
        words += [] if value is None else [f"--{option}", str(value)]
    return f"cd {shlex.quote(str(here))} && {shlex.join(words)}"
