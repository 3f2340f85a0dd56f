"""Environment variables of the processes of a node: the run, addresses, and the secrets that each process needs."""

from collections.abc import Container
from typing import Final

import msgspec

from runtime.bus.addresses import (
    ADDRESS_VARIABLE,
    BUS_CERTIFICATE_VARIABLE,
    BUS_URL_VARIABLE,
    ENGINE_KEY_VARIABLE,
    NODE_VARIABLE,
)
from runtime.node.claims.rundir import TOPOLOGY_VARIABLE
from runtime.node.node_plan import NodePlan
from runtime.settings.processes import ProcessSpec, Tier
from runtime.util.secrets import Secret

INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # else gloo takes that of the host's name
HOST_VARIABLE: Final = "SGLANG_HOST_IP"


def environment_of(plan: NodePlan, own: Container[str]) -> dict[str, str]:
    """Return the environment variables of all processes of a node.

    Args:
        plan: plan of the node.
        own: variables of the daemon. Those of libraries that it has are not set again.
    """
    environment = {
        "PHYSARUM_RUN": plan.run,
        "PHYSARUM_RUN_DIR": str(plan.run_dir),
        NODE_VARIABLE: plan.node,
    }
    if plan.topology_file is not None:
        environment[TOPOLOGY_VARIABLE] = plan.topology_file
    if plan.address is None:
        return environment
    environment[ADDRESS_VARIABLE] = plan.address.ip
    by_libraries = dict.fromkeys(INTERFACE_VARIABLES, plan.address.interface) | {HOST_VARIABLE: plan.address.ip}
    return environment | {name: value for name, value in by_libraries.items() if name not in own}


def with_secrets(
    spec: ProcessSpec, incarnation: int, engine_key: Secret, bus_url: Secret | None, certificate: str | None
) -> ProcessSpec:
    """Add secrets to a process's environment. Only its owner can read it; engines and routers get no bus login.

    Args:
        spec: of the process.
        incarnation: of the node daemon.
        engine_key: API key of engines and routers.
        bus_url: with the login; None: there is no bus.
        certificate: PEM certificate of the bus, if it has one of its own.
    """
    env = {"PHYSARUM_PROCESS": spec.name, **spec.env, "PHYSARUM_INCARNATION": str(incarnation)}
    if spec.tier is Tier.ACTOR and bus_url is not None:
        env[BUS_URL_VARIABLE] = bus_url.reveal()
        if certificate is not None:
            env[BUS_CERTIFICATE_VARIABLE] = certificate
    if spec.tier is Tier.SERVICE:
        env[ENGINE_KEY_VARIABLE] = engine_key.reveal()
    return msgspec.structs.replace(spec, env=env)
