"""--node auto: which node of the topology a process of Slurm or Kubernetes is."""

from pathlib import Path

import pytest

from runtime.settings.job_system import NoNode, node_of_job
from runtime.settings.load import load_topology

NODES = ("n0", "n1", "n10")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        (SLURM, "n1"),
        (SLURM | {"SLURM_NODEID": "2"}, "n10"),  # the order of the file, not of the names
        (SLURM | {"JOB_COMPLETION_INDEX": "0"}, "n1"),  # a Slurm that runs in pods
        ({"JOB_COMPLETION_INDEX": "0"}, "n0"),
        ({"JOB_COMPLETION_INDEX": "2"}, "n10"),
        ({"JOB_COMPLETION_INDEX": "1", "SLURM_NODEID": "0"}, "n1"),  # no job of Slurm
    ],
)
def test_the_nth_task_is_the_nth_node_of_the_file(environment: dict[str, str], node: str) -> None:
    assert node_of_job(environment, NODES) == node


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, r"neither Slurm \(SLURM_NODEID\) nor .* \(JOB_COMPLETION_INDEX\) .*; name a node: n0, n1, n10$"),
        (SLURM | {"SLURM_NNODES": "2"}, r"2 nodes \(SLURM_NNODES\), and the topology has 3: n0, n1, n10; .*--nodes=3"),
        (SLURM | {"SLURM_NNODES": "4"}, "on 4 nodes .* has 3: n0, n1, n10; submit with --nodes=3"),
        (SLURM | {"SLURM_LOCALID": "1"}, "several tasks on one node .*--ntasks-per-node=1"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3, and the topology has 3 nodes"),
        (SLURM | {"SLURM_NODEID": "-1"}, "SLURM_NODEID is not a number: '-1'"),
        (SLURM | {"SLURM_NNODES": ""}, "SLURM_NNODES is not a number: ''"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_NODEID": "0"}, "not a task of srun .*: start it with srun"),
        ({"JOB_COMPLETION_INDEX": "3"}, r"JOB_COMPLETION_INDEX=3, .* n0, n1, n10; .*\(completions\)"),
        ({"JOB_COMPLETION_INDEX": "²"}, "JOB_COMPLETION_INDEX is not a number"),
    ],
)
def test_what_fits_no_node_is_refused_by_names(environment: dict[str, str], text: str) -> None:
    with pytest.raises(NoNode, match=text):
        node_of_job(environment, NODES)


def test_a_node_called_auto_is_refused() -> None:
    with pytest.raises(NoNode, match="a node called auto"):
        node_of_job(SLURM, ("n0", "auto", "n2"))


def test_nodes_count_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    head = 'include = "recipes/reverse-digits.toml"\nrun.name = "two"\ntrainer.device = "cpu"\nbus.node = "z"\n'
    file.write_text(f'{head}engines.policy.kind = "tiny"\nnodes = {{ z = {{}}, a = {{}} }}\n')
    nodes = tuple(load_topology(file).topology.nodes)
    assert node_of_job({"JOB_COMPLETION_INDEX": "0"}, nodes) == "z"
    assert node_of_job({"JOB_COMPLETION_INDEX": "1"}, nodes) == "a"
