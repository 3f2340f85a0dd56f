"""Starts or resumes a run on this node and follows it to its end."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO, cast
from urllib.parse import urlsplit

import anyio
import msgspec
import structlog

from runtime.bus.background import in_background
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.node.acceptance import READ_WITHIN_S, Acceptance, Answer, NodeStatement, NotAnswered
from runtime.node.checks.facts import NodeFacts, facts_here
from runtime.node.checks.machine import raise_open_files
from runtime.node.claims.claim import Claim, RunClaimed, refuse_claimed
from runtime.node.claims.discarding import NotDiscarded, discard
from runtime.node.claims.rundir import (
    METRICS_FILE,
    NODE_TOPOLOGY_FILE,
    RunRefused,
    StoredResult,
    check_start,
    claimed_node,
    prepare,
    put_back,
    store_result,
    stored_result,
    topology_in,
    wants_more_steps,
)
from runtime.node.daemon import NodeDaemon
from runtime.node.display import Show
from runtime.node.join import JOIN_FILE, LIMITS, Join, NotJoined, joined
from runtime.node.network import (
    NoAddress,
    NodeAddress,
    address_here,
    address_towards,
    interfaces_here,
    resolve_name,
    source_towards,
)
from runtime.node.node_plan import NodePlan, RunEnd, exit_code_of
from runtime.node.planning import LOGS, SpecsOf, StartOptions, bus_login, plan_of
from runtime.node.run_files import Brought, RunFile, bring, lacking, path_of, problems_of, with_files
from runtime.node.supervisor.state_changes import GivenUp
from runtime.node.versions import record_versions
from runtime.process.logs import configure_logging, silenced
from runtime.report.summary import KeptCheckpoint, Result, checkpoint_lines, with_checkpoint
from runtime.settings.load import LoadedTopology
from runtime.settings.placement import AUTO, BUS_PORT, address_setting, home_node, is_loopback, is_networked
from runtime.settings.reading.config import TopologyError
from runtime.settings.topology import Topology, encode_topology
from runtime.util.disk import LinesWhileRoom, is_full, no_space_of
from runtime.util.exit_codes import EXIT_INPUT_ERROR, EXIT_NO_SPACE
from runtime.util.files import write_atomically
from runtime.util.formatting import printable_json
from runtime.util.secrets import Secret, with_login, without_logins

__all__ = ["End", "RunRefused", "node_address", "start", "with_files_from_home"]

KeptOf = Callable[[Path], KeptCheckpoint | None]  # None: the run directory has no checkpoint
STATE_WITHIN_S = 60.0  # for the problems of a node


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Exit code and result of the command."""

    exit_code: int
    result_json: str


def start(
    topology: Topology,
    options: StartOptions,
    *,
    specs_of: SpecsOf,
    kept_of: KeptOf,
    show: Show,
    rewrite: Show | None = None,
) -> End:
    """Start or resume a run and follow it to its end.

    Args:
        specs_of: returns the processes of a topology on a node.
        kept_of: returns the newest undamaged checkpoint in the directory of a finished run.
        show: prints a line for the user.
        rewrite: replaces the last printed line, on a terminal.

    Raises:
        RunRefused: the run cannot be started.
    """
    run_dir = Path(topology.run.dir) / topology.run.name
    if options.problems and options.node == home_node(topology):
        _report_problems(topology, options, run_dir, show)
    check_start(topology, options.fresh, options.node, join=options.join, take_over=options.take_over)
    raise_open_files(topology)
    if options.node != home_node(topology):
        return _take_part(topology, options, run_dir, specs_of=specs_of, show=show, rewrite=rewrite)
    with _claim(run_dir, claimed_node(topology, options.node)) as claim:
        _refuse_beside(claim)
        if options.fresh is not None:
            _start_over(claim, topology, options)
        if (stored := _finished(topology, run_dir)) is not None:
            result = _with_checkpoint(stored.result, kept_of, run_dir, topology.train.num_steps, show)
            stored = msgspec.structs.replace(stored, result=result)
            return _end_of_a_finished_run(stored, topology.run.name, run_dir, options, show)
        before = topology_in(run_dir)
        for change in prepare(claim, topology):
            show(f"changed since the last start: {change}")
        try:
            record_versions(run_dir, topology, options.node)
            address = node_address(topology, options.node, None) if is_networked(topology) else None
            acceptance = _acceptance(topology, options, run_dir, address)
            plan = plan_of(topology, options, claim, specs_of, address)
            return _run(plan, options, show, rewrite, acceptance, kept_of)
        except RunRefused:
            put_back(claim, before)
            raise
        except OSError as error:
            if not is_full(error):
                raise
            raise RunRefused(str(no_space_of(error, run_dir))) from error


def _report_problems(topology: Topology, options: StartOptions, run_dir: Path, show: Show) -> NoReturn:
    """Start the bus of a run that cannot start, for as long as the other nodes need to read why.

    Raises:
        RunRefused: always, with the problems of home.
    """
    reasons = "\n".join(map(str, options.problems))
    if options.fresh is None and _finished(topology, run_dir) is not None:
        raise RunRefused(reasons)  # the other nodes end by themselves
    others = ", ".join(name for name in topology.nodes if name != options.node)
    show(f"reporting this to node {others}, for up to {READ_WITHIN_S:g} s")
    try:
        with _claim(run_dir, options.node) as claim:
            _refuse_beside(claim)
            address = node_address(topology, options.node, None)
            plan = plan_of(topology, options, claim, lambda topology, node, run_dir: (), address)
            acceptance = Acceptance(topology, options.node, NodeFacts(problems=options.problems), run_dir)
            _, outcome = _run_daemon(msgspec.structs.replace(plan, keeps_metrics=False), show, None, acceptance)
        why = outcome.refused or outcome.error or (outcome.failure and outcome.failure.reason) or reasons
    except (RunRefused, OSError) as error:
        why = str(error)
    if why != reasons:
        show(f"not reported to the other nodes: {why}")
    raise RunRefused(reasons)


def _take_part(
    topology: Topology, options: StartOptions, run_dir: Path, *, specs_of: SpecsOf, show: Show, rewrite: Show | None
) -> End:
    """Join the home node's run and follow it to its end. In a shared run directory, write only this node's files.

    Raises:
        RunRefused: the run's bus was not found in time, or this node cannot take part.
    """
    node, join = options.node, None
    if topology.bus.url is None:
        join = _joined(topology, options, run_dir, _wait_s(topology, options), show)
        if join is None:
            stored = _finished(topology, run_dir)
            if stored is None:
                raise RunRefused(f"{run_dir} was discarded while node {node} waited for its bus; start the node again")
            return _end_of_a_finished_run(stored, topology.run.name, run_dir, options, show)
    address = node_address(topology, options.node, topology.bus.url if join is None else join.url)
    try:
        statement = _state_facts(topology, options, run_dir, address, join)
    except RunRefused:
        if options.fresh is None and (stored := _finished(topology, run_dir)) is not None:  # meanwhile
            return _end_of_a_finished_run(stored, topology.run.name, run_dir, options, show)
        raise
    with _claim(run_dir, node) as claim:
        _refuse_beside(claim)
        try:
            write_atomically(run_dir / NODE_TOPOLOGY_FILE.format(node), encode_topology(topology))
            record_versions(run_dir, topology, node)
            plan = plan_of(topology, options, claim, specs_of, address, join)
            return _run(plan, options, show, rewrite, statement, lambda _: None)
        except OSError as error:
            if not is_full(error):
                raise
            raise RunRefused(str(no_space_of(error, run_dir))) from error


def with_files_from_home(loaded: LoadedTopology, options: StartOptions, show: Show) -> LoadedTopology:
    """Fetch the files that this node lacks from the nodes of the run, and return the topology with their paths.

    They come into the run directory. If the run is finished, the topology is unchanged.

    Raises:
        RunRefused: this node has no address, or the run's bus was not found in time.
        TopologyError: some did not come; each problem has the reason.
    """
    files = lacking(loaded, options.node)
    brought = _brought(loaded.topology, options, files, show)
    if brought.missing:
        raise TopologyError(problems_of(files, brought.missing))
    return with_files(
        loaded, {each.key: path_of(brought.paths[each.key], each) for each in files if each.key in brought.paths}
    )


def _brought(topology: Topology, options: StartOptions, files: Sequence[RunFile], show: Show) -> Brought:
    from runtime.node.sharing import Sharing  # with aiohttp, which nodes that have all files need not load

    node, run_dir = options.node, Path(topology.run.dir) / topology.run.name
    wait_s, join = topology.nodes[node].wait_s, None
    if topology.bus.url is None:
        join = _joined(topology, options, run_dir, wait_s, show)
        if join is None:  # the run is finished
            return Brought({}, {})
    url = with_login(topology.bus.url or "", bus_login(topology, options)) if join is None else join.url_with_login
    address = node_address(topology, node, topology.bus.url if join is None else join.url)
    certificate = None if join is None else join.certificate
    sharing = Sharing(run_dir, node, address, is_home=False, show=show)

    async def fetch() -> Brought:
        async with (
            Bus.connect(url, topology.run.name, name=f"files-{node}", limits=LIMITS, certificate=certificate) as bus,
            in_background(partial(sharing.run, bus)),
        ):
            return await bring(bus, sharing, node, [each.key for each in files], wait_s=wait_s, show=show)

    try:
        with silenced():
            return anyio.run(fetch)
    except (BusError, OSError) as error:
        return Brought({}, {each.key: str(error) for each in files})


def node_address(topology: Topology, node: str, bus_url: str | None) -> NodeAddress:
    """Return this node's address. "auto" is the source address of the route to the bus, once there is a bus.

    Raises:
        RunRefused: the setting means no address of this machine, or several.
    """
    setting = address_setting(topology, node)
    try:
        if setting != AUTO or bus_url is None:
            return address_here(setting, interfaces_here(), resolve_name)
        bus = urlsplit(bus_url.partition(",")[0])
        host = bus.hostname or ""
        return address_towards(
            source_towards(host, bus.port or BUS_PORT), interfaces_here(), loopback=is_loopback(host)
        )
    except (NoAddress, OSError) as error:
        raise RunRefused(f'nodes.{node}.address = "{setting}": {error}') from error


def _acceptance(
    topology: Topology, options: StartOptions, run_dir: Path, address: NodeAddress | None
) -> Acceptance | None:
    """Return what compares other nodes with home; None if there are none."""
    if address is None or len(topology.nodes) == 1:
        return None
    facts = facts_here(topology, options.node, address=address.announced)
    return Acceptance(topology, options.node, facts, run_dir)


def _state_facts(
    topology: Topology, options: StartOptions, run_dir: Path, address: NodeAddress, join: Join | None
) -> NodeStatement:
    """State the facts of this node to home, before any of its processes starts.

    Raises:
        RunRefused: home refuses the node, or does not answer within nodes.<name>.wait_s.
    """
    node, wait_s = options.node, _wait_s(topology, options)
    facts = facts_here(topology, node, problems=options.problems, address=address.announced)
    url = with_login(topology.bus.url or "", bus_login(topology, options)) if join is None else join.url_with_login
    certificate = None if join is None else join.certificate
    statement = NodeStatement(node, facts, run_dir)

    async def state() -> Answer:
        name = f"facts-{node}"
        async with Bus.connect(url, topology.run.name, name=name, limits=LIMITS, certificate=certificate) as bus:
            return await statement.state(bus, wait_s=wait_s, is_over=lambda: _finished(topology, run_dir) is not None)

    try:
        with silenced():
            refusals = anyio.run(state).refusals
    except (NotAnswered, BusError) as error:
        raise RunRefused(f"{error} (nodes.{node}.wait_s = {wait_s:g})") from error
    if refusals or options.problems:
        raise RunRefused("\n".join(refusals or map(str, options.problems)))
    return statement


def _joined(topology: Topology, options: StartOptions, run_dir: Path, wait_s: float, show: Show) -> Join | None:
    """Wait for the bus of the run; return None if the run is finished.

    Raises:
        RunRefused: there was none in time.
    """
    node, path = options.node, options.join or run_dir / JOIN_FILE
    waiting = partial(joined, path, topology.run.name, run_dir, wait_s=wait_s, show=show)
    try:
        is_over = partial(_is_over, topology, options, run_dir)
        return anyio.run(partial(waiting, is_finished=is_over))
    except NotJoined as error:
        why = f"found no bus of run {topology.run.name} within {wait_s:g} s (nodes.{node}.wait_s)"
        raise RunRefused("\n".join([*map(str, options.problems), f"node {node} {why}: {error}"])) from error


def _is_over(topology: Topology, options: StartOptions, run_dir: Path) -> bool:
    return options.fresh is None and _finished(topology, run_dir) is not None


def _wait_s(topology: Topology, options: StartOptions) -> float:
    """Return how long this node waits for home. A node with problems waits briefly: home may have ended by the same."""
    wait_s = topology.nodes[options.node].wait_s
    return min(wait_s, STATE_WITHIN_S) if options.problems else wait_s


def _claim(run_dir: Path, node: str | None) -> Claim:
    try:
        return Claim.take(run_dir, node=node)
    except RunClaimed as error:
        raise RunRefused(str(error)) from error
    except OSError as error:
        reason = no_space_of(error, run_dir) if is_full(error) else f"{run_dir} cannot be used: {error}"
        raise RunRefused(str(reason)) from error


def _refuse_beside(claim: Claim) -> None:
    """Refuse to run if another daemon claimed a part of the directory since `check_start`."""
    try:
        refuse_claimed(claim.run_dir, claim.node, held=claim)
    except RunClaimed as error:
        raise RunRefused(str(error)) from error


def _start_over(claim: Claim, topology: Topology, options: StartOptions) -> None:
    """Discard the run. Its streams are discarded on the home node only, and only if the user named the run."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the log goes too
    url = topology.bus.url if options.fresh and options.node == home_node(topology) else None
    bus_url = None if url is None else Secret(with_login(url, bus_login(topology, options)))
    try:
        discard(claim, topology.run.name, topology.nodes, bus_url)
    except NotDiscarded as error:
        raise RunRefused(str(error)) from error


def _run(
    plan: NodePlan,
    options: StartOptions,
    show: Show,
    rewrite: Show | None,
    comparison: Acceptance | NodeStatement | None,
    kept_of: KeptOf,
) -> End:
    if plan.owns_streams:
        requests = f", dispatcher {plan.router}" if plan.router else ""
        show(f"{'resuming' if plan.incarnation > 1 else 'starting'} run {plan.run} in {plan.run_dir}{requests}")
    else:
        show(f"node {plan.node} joins run {plan.run} at {without_logins(plan.bus_url or '')}")
    daemon, outcome = _run_daemon(plan, show, rewrite, comparison)
    if outcome.refused is not None:
        raise RunRefused(outcome.refused)
    report, now = daemon.reporting.report, time.time()
    result = report.result(now)
    if outcome.finished:
        result = _with_checkpoint(result, kept_of, plan.run_dir, plan.num_steps, show)
    stored = StoredResult(finished=outcome.finished, result=result)
    try:
        if plan.owns_streams:
            store_result(plan.run_dir, stored)
    except OSError as error:
        show(f"the result of the run cannot be stored: {error}")
    _show_all(show, ["", _headline(plan.run, outcome), *report.summary(now), *checkpoint_lines(result.checkpoint)])
    _show_all(show, _what_next(plan.run, plan.run_dir, options, finished=outcome.finished))
    if outcome.failure is not None:
        _show_all(show, _lines_of_a_failure(plan.run, outcome.failure))
    return End(exit_code=exit_code_of(outcome), result_json=_json_of(stored))


def _with_checkpoint(result: Result, kept_of: KeptOf, run_dir: Path, num_steps: int, show: Show) -> Result:
    """Compare the newest checkpoint of a finished run with its checksums: it may be damaged since it was saved."""
    try:
        return with_checkpoint(result, kept_of(run_dir), num_steps)
    except (OSError, ValueError) as error:
        show(f"the checkpoints of the run cannot be compared with their checksums: {error}")
        return result


def _run_daemon(
    plan: NodePlan, show: Show, rewrite: Show | None, comparison: Acceptance | NodeStatement | None
) -> tuple[NodeDaemon, RunEnd]:
    """Run the daemon of a node, which logs to a file of its own, and return it with its outcome."""
    log_path = (plan.log_dir or plan.run_dir / LOGS) / "daemon.jsonl"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with closing(LinesWhileRoom(log_path.open("a", encoding="utf-8"))) as log_file:
        configure_logging("daemon", plan.run, cast("TextIO", log_file))
        daemon = NodeDaemon(plan, show=show, rewrite=rewrite, comparison=comparison)
        return daemon, anyio.run(daemon.run, backend="asyncio")  # plain loop: children are forked from the main thread


def _headline(run: str, outcome: RunEnd) -> str:
    if outcome.finished:
        return f"run {run} finished"
    if outcome.stopped_by is not None:
        return f"run {run} stopped"
    if outcome.stopped is not None:
        return f"run {run} stopped by node {outcome.stopped.node}: {outcome.stopped.reason}"
    return f"run {run} failed" if outcome.error is None else f"run {run} failed: {outcome.error}"


def _what_next(run: str, run_dir: Path, options: StartOptions, *, finished: bool) -> Iterator[str]:
    yield f"run dir   {run_dir}"
    yield f"inspect   {run_dir / METRICS_FILE}, {run_dir / 'logs'}/<process>.jsonl"
    if finished:
        yield f"again     {options.command} --fresh {run}"
    else:
        yield f"continue  {options.command}"


def _finished(topology: Topology, run_dir: Path) -> StoredResult | None:
    """Return the result of the run, if it is finished and the topology asks for no further steps."""
    stored = stored_result(run_dir)
    return stored if stored is not None and stored.finished and not wants_more_steps(run_dir, topology) else None


def _end_of_a_finished_run(stored: StoredResult, run: str, run_dir: Path, options: StartOptions, show: Show) -> End:
    _show_all(show, _lines_of_a_finished_run(stored, run, run_dir, options))
    return End(exit_code=0, result_json=_json_of(stored))


def _lines_of_a_finished_run(stored: StoredResult, run: str, run_dir: Path, options: StartOptions) -> Iterator[str]:
    result = stored.result
    reward = "" if result.reward_last is None else f", reward {result.reward_last:.3f}"
    yield f"run {run} is finished: {result.steps} steps{reward}"
    yield from checkpoint_lines(result.checkpoint)
    yield f"to start over and discard it: {options.command} --fresh {run}"
    yield from _what_next(run, run_dir, options, finished=True)


def _lines_of_a_failure(run: str, failure: GivenUp) -> Iterator[str]:
    """Yield where the run failed, and as the last line why."""
    yield f"log       {failure.log}"
    if failure.tail and failure.exit_code not in (
        EXIT_INPUT_ERROR,
        EXIT_NO_SPACE,
    ):  # one sentence is enough for wrong input
        yield f"its last {len(failure.tail)} lines:"
        yield from (f"  {line}" for line in failure.tail)
    name = failure.spec.name
    yield f"run {run} failed: {name}: {failure.reason.removeprefix(f'{name}: ')}"  # actors include their own name


def _json_of(stored: StoredResult) -> str:
    return printable_json(msgspec.json.encode(stored.result).decode())


def _show_all(show: Show, lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        show(line)
