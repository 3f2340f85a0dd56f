"""Whether a start would go on this machine, as far as it can be told without knowing an actor."""

from collections.abc import Iterator

from runtime.agent.preflight.built import not_built
from runtime.agent.preflight.files import check_paths, paths_of
from runtime.agent.preflight.findings import Checked, Findings
from runtime.agent.preflight.machine import check_machine
from runtime.settings.load import LoadedTopology
from runtime.settings.placement import bus_node
from runtime.settings.topology import Topology


def check_here(loaded: LoadedTopology, node: str | None = None, *, elsewhere: bool = False) -> Checked:
    """Look for what a topology needs, and for what is not built.

    Args:
        loaded: the topology.
        node: which of its nodes this machine is; none: the one with the bus.
        elsewhere: leave out what only the machine can show where the run is to be: GPUs, interpreters with their
            packages, paths, addresses.
    """
    findings = Findings(loaded)
    topology = loaded.topology
    for problem in not_built(topology):
        findings.add(problem)
    if elsewhere:
        return findings.checked(left_out=tuple(_left_out(topology)))
    has_login = loaded.bus_login is not None or topology.bus.credentials is not None
    check_machine(findings, node or bus_node(topology) or next(iter(topology.nodes)), has_login=has_login)
    check_paths(findings)
    return findings.checked()


def _left_out(topology: Topology) -> Iterator[str]:
    gpus = [f"{name}: {node.gpus}" for name, node in topology.nodes.items() if node.gpus]
    yield f"GPUs ({', '.join(gpus) or 'none asked for'})"
    yield "interpreters and what is installed in them"
    yield f"paths ({', '.join(paths_of(topology))})"
    yield "addresses and ports"
