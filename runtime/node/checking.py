"""`--check` on several nodes: a short-lived bus at home, where all nodes state their facts and get one answer."""

import tempfile
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from runtime.bus.addresses import host_port, split_host_port
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.bus.limits import MIB, StreamLimits
from runtime.bus.nats.accounts import NODE_USER
from runtime.bus.nats.certificate import own_certificate
from runtime.bus.nats.server import ServerSettings
from runtime.node.acceptance import Acceptance, Answer, NodeStatement, NotAnswered
from runtime.node.checks.facts import NodeFacts, facts_here
from runtime.node.claims.run_id import KEY, IdOnBus, RunMismatch, id_in
from runtime.node.display import Show
from runtime.node.join import JOIN_FILE, LIMITS, Join, NotJoined, joined, write_join
from runtime.node.network import NodeAddress
from runtime.node.reopen import server_in
from runtime.node.run_files import given_by_home, sizes_of
from runtime.node.start import RunRefused, node_address
from runtime.process.logs import silenced
from runtime.settings.placement import bus_port, home_node, roles_of, trainer_nodes
from runtime.settings.reading.config import Problem
from runtime.settings.topology import POLICY, Topology
from runtime.util.files import PRIVATE_DIRECTORY
from runtime.util.secrets import Login, Secret

STREAMS: Final = StreamLimits(event_bytes=MIB, work_bytes=MIB, data_bytes=MIB, dead_bytes=MIB, kv_bytes=16 * MIB)
ANSWER_WITHIN_S: Final = 30.0  # after the last node came, or its wait_s has passed


def check_nodes(
    topology: Topology,
    node: str,
    problems: Sequence[Problem],
    *,
    join: Path | None,
    coming: Sequence[str] = (),
    show: Show,
) -> Answer:
    """Compare this machine with those of the other nodes, on which the same command runs. Nothing of it stays.

    Args:
        topology: the topology.
        node: the node that this machine is.
        problems: of its own checks.
        join: join file of the check; none: the one in the run directory.
        coming: settings whose files this node lacks, and would fetch at a start.
        show: prints a line for the user.

    Raises:
        RunRefused: home's bus cannot be started, or did not answer in time.
    """
    run_dir = Path(topology.run.dir) / topology.run.name
    try:
        with silenced():
            if node == home_node(topology):
                address = node_address(topology, node, None)
                facts = facts_here(topology, node, problems=problems, address=address.announced)
                sizes = {key: str(each) for key, each in sizes_of(given_by_home(topology)).items()}
                facts = msgspec.structs.replace(facts, gives=sizes)
                return anyio.run(partial(_at_home, topology, node, facts, run_dir, address, show))
            return _elsewhere(topology, node, problems, run_dir, join or run_dir / JOIN_FILE, coming, show)
    except (BusError, OSError) as error:
        raise RunRefused(f"the nodes cannot be compared: {error}") from error


def questions(topology: Topology, node: str) -> Iterator[str]:
    """Yield what only the other nodes can answer, a line for each."""
    run_dir = Path(topology.run.dir) / topology.run.name
    for other, settings in topology.nodes.items():
        if other == node:
            continue
        roles = roles_of(topology, other)
        in_files = POLICY in roles.pools and topology.engines[POLICY].weight_transport == "disk"
        shares = in_files or (roles.trains and len(trainer_nodes(topology)) > 1)
        asked = [
            "versions",
            f"{settings.gpus} GPUs" if settings.gpus else "",
            "data" if roles.is_home else "",
            "the model" if roles.needs_model else "",
            f"engines.{', '.join(roles.pools)}" if roles.pools else "",
            f"the common directory {run_dir}" if shares and not roles.is_home else "",
        ]
        yield f"node {other}: {', '.join(filter(None, asked))}"


async def _at_home(
    topology: Topology, node: str, facts: NodeFacts, run_dir: Path, address: NodeAddress, show: Show
) -> Answer:
    """Run the bus of the check, and collect the facts of all nodes on it."""
    login = Login(user=NODE_USER, password=Secret.random())
    with tempfile.TemporaryDirectory(prefix="physarum-check-") as place, _run_dir_of_a_check(run_dir) as own_id:
        certificate = own_certificate(Path(place) / "certificate")
        settings = ServerSettings(
            store_dir=Path(place) / "nats",
            host=address.ip,
            port=bus_port(topology) or -1,
            certificate=certificate,
            login=login,
        )
        acceptance = Acceptance(topology, node, facts, run_dir)
        async with (
            server_in(Path(place), settings) as url,
            Bus.connect(url, topology.run.name, name="check", limits=LIMITS, certificate=certificate.pem()) as bus,
        ):
            await bus.ensure_streams(STREAMS)
            await bus.kv.put(KEY, IdOnBus(id=own_id, owned=True, made_in="a check"))
            try:
                await acceptance.open(bus)
                join = Join(
                    run=topology.run.name,
                    run_id=own_id,
                    incarnation=0,
                    url=f"tls://{host_port(address.announced, split_host_port(url)[1])}",
                    user=NODE_USER,
                    password=login.password.reveal(),
                    certificate=certificate.pem(),
                    is_check=True,
                )
                await anyio.to_thread.run_sync(write_join, run_dir / JOIN_FILE, join)
                show(f"waiting for the other nodes: {', '.join(name for name in topology.nodes if name != node)}")
                return await acceptance.collect(bus, show)
            finally:
                acceptance.close()


@contextmanager
def _run_dir_of_a_check(run_dir: Path) -> Generator[str]:
    """Make the run directory if there is none, and yield the id of its run. Delete afterwards what the check made.

    Raises:
        RunRefused: the directory holds the id of a run, and it cannot be read.
        OSError: the directory cannot be made.
    """
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        stored = id_in(run_dir)
        yield uuid.uuid4().hex if stored is None else stored.id
    except RunMismatch as error:
        raise RunRefused(str(error)) from error
    finally:
        (run_dir / JOIN_FILE).unlink(missing_ok=True)  # that of a start is written anew by each start
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _elsewhere(
    topology: Topology,
    node: str,
    problems: Sequence[Problem],
    run_dir: Path,
    path: Path,
    coming: Sequence[str],
    show: Show,
) -> Answer:
    """Find the bus of the check, or of the run if it runs, state the facts of this node there, and return the answer.

    Raises:
        RunRefused: home did not answer in time.
    """
    home, wait_s = home_node(topology), topology.nodes[node].wait_s
    waiting = partial(joined, path, topology.run.name, run_dir, wait_s=wait_s, show=show, checks=True)
    try:
        join = anyio.run(partial(waiting, is_finished=lambda: False))
        assert join is not None  # only of a finished run
        address = node_address(topology, node, join.url)
        facts = facts_here(topology, node, problems=problems, address=address.announced)
        facts = msgspec.structs.replace(facts, lacks=tuple(coming))
        return anyio.run(_state, topology, node, facts, run_dir, join)
    except NotJoined as error:
        missing = f"node {home} did not come within {wait_s:g} s (nodes.{node}.wait_s): {error}"
        own = tuple(f"node {node}: {problem}" for problem in problems)
        return Answer(start="", home="", refusals=own, missing=(missing,))
    except NotAnswered as error:
        raise RunRefused(str(error)) from error


async def _state(topology: Topology, node: str, facts: NodeFacts, run_dir: Path, join: Join) -> Answer:
    wait_s = max(each.wait_s for each in topology.nodes.values()) + ANSWER_WITHIN_S
    name = f"facts-{node}"
    async with Bus.connect(
        join.url_with_login, topology.run.name, name=name, limits=LIMITS, certificate=join.certificate
    ) as bus:
        return await NodeStatement(node, facts, run_dir).state(bus, wait_s=wait_s, only_checks=True)
