"""topologies/cluster/kubernetes.yaml: its fields by name and type; its command on two machines with its DNS names."""

import json
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import yaml

from runtime.node.daemon import STOP_DEADLINE_S
from runtime.settings.job_system import node_of_job
from runtime.settings.load import load_topology
from tests.support.machines.lan import ROOT, machines

MANIFEST = ROOT / "topologies" / "cluster" / "kubernetes.yaml"
RUN_S = 240.0


class Fields(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A part of the manifest. It has these fields only, under the names and types of the schemas of JobSet 0.13."""


class Named(Fields):
    name: str


class ExitCodes(Fields):
    container_name: str
    operator: Literal["In", "NotIn"]
    values: list[int]


class FailureRule(Fields):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    on_exit_codes: ExitCodes


class FailurePolicy(Fields):
    rules: list[FailureRule]


class Mount(Fields):
    name: str
    mount_path: str


class Resources(Fields):
    limits: dict[str, int]


class Container(Fields):
    name: str
    image: str
    command: list[str]
    working_dir: str | None = None
    resources: Resources | None = None
    volume_mounts: list[Mount] = []


class Claim(Fields):
    claim_name: str


class Memory(Fields):
    medium: Literal["Memory"]


class Volume(Fields):
    name: str
    persistent_volume_claim: Claim | None = None
    empty_dir: Memory | None = None


class PodSpec(Fields):
    restart_policy: Literal["Never"]  # the only one that podFailurePolicy allows
    termination_grace_period_seconds: int
    init_containers: list[Container]
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(Fields):
    spec: PodSpec


class JobSpec(Fields):
    completion_mode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoff_limit: int
    pod_failure_policy: FailurePolicy
    template: PodTemplate


class JobTemplate(Fields):
    spec: JobSpec


class ReplicatedJob(Fields):
    name: str
    replicas: int
    template: JobTemplate


class Network(Fields):
    publish_not_ready_addresses: bool
    enable_dns_hostnames: bool = msgspec.field(name="enableDNSHostnames")


class JobSetSpec(Fields):
    network: Network
    replicated_jobs: list[ReplicatedJob]


class JobSet(Fields):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: Named
    spec: JobSetSpec


def manifest() -> JobSet:
    return msgspec.convert(yaml.safe_load(MANIFEST.read_text()), JobSet)


def names() -> list[str]:
    """DNS names of the pods: <JobSet>-<job>-<replica>-<index>.<JobSet>."""
    job_set = manifest()
    [job] = job_set.spec.replicated_jobs
    name = job_set.metadata.name
    return [f"{name}-{job.name}-0-{index}.{name}" for index in range(job.template.spec.completions)]


def command() -> list[str]:
    """Options of bin/start-topology in the manifest."""
    [container] = manifest().spec.replicated_jobs[0].template.spec.template.spec.containers
    assert container.command[0] == "bin/start-topology"
    return container.command[1:]


def test_the_manifest_fits_its_topology() -> None:
    [job] = manifest().spec.replicated_jobs
    spec = job.template.spec
    pod = spec.template.spec
    topology, *options = command()
    settings = [option.removeprefix("--set=") for option in options if option.startswith("--set=")]
    loaded = load_topology(ROOT / topology, settings).topology
    assert "--node=auto" in options
    assert job.replicas == 1  # of several, each would have pods of the same indices
    assert spec.completions == spec.parallelism == len(loaded.nodes)
    by_index = [node_of_job({"JOB_COMPLETION_INDEX": str(index)}, tuple(loaded.nodes)) for index in range(2)]
    assert [loaded.nodes[node].address for node in by_index] == names()
    assert {loaded.nodes[node].gpus for node in by_index} == set(
        (pod.containers[0].resources or Resources({})).limits.values()
    )
    assert pod.termination_grace_period_seconds > STOP_DEADLINE_S
    assert spec.pod_failure_policy.rules[0].on_exit_codes.container_name == pod.containers[0].name
    assert {mount.name for mount in pod.containers[0].volume_mounts} == {volume.name for volume in pod.volumes}
    assert {mount.mount_path for mount in pod.containers[0].volume_mounts} == {loaded.run.dir, "/dev/shm"}
    assert names()[0].partition(".")[2] in pod.init_containers[0].command[-1]


@pytest.mark.nodes
@pytest.mark.nightly
def test_the_manifests_command_trains_on_two_machines_with_its_names(tmp_path: Path) -> None:
    hosts = {"n0": "10.77.0.10", "n1": "10.77.0.11"}
    lines = [f"{address} {name}" for address, name in zip(hosts.values(), names(), strict=True)]
    options = [option.replace("/runs", str(tmp_path)) for option in command()[1:]]
    whole = [sys.executable, "-P", ROOT / "bin" / "physarum.py", "start-topology", "laptop-two-nodes", *options]
    pods = {node: names()[index].partition(".")[0] for index, node in enumerate(hosts)}
    with machines("n0", "n1", shared=tmp_path, hosts=dict.fromkeys(hosts, lines), hostnames=pods) as lan:
        assert [lan[name].address for name in hosts] == list(hosts.values())
        started = [
            lan[name].start(
                [*whole, "--set", "train.num_steps=5"], env={"JOB_COMPLETION_INDEX": str(index)}, cwd=tmp_path
            )
            for index, name in enumerate(hosts)
        ]
        assert [process.wait(RUN_S) for process in started] == [0, 0]
        assert names()[0] in (tmp_path / "laptop-two-nodes" / "join.toml").read_text()
    assert json.loads((tmp_path / "laptop-two-nodes" / "result.json").read_text())["finished"]
