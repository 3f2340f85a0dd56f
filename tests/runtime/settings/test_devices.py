"""GPUs that a job system hands out, that files show, and that processes are told of."""

from pathlib import Path

import pytest

from runtime.settings.devices import HIDDEN, gpus_here, handed_out, with_own_gpus

MIG = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, ("2", "5")),  # Slurm
        ({"CUDA_VISIBLE_DEVICES": f" {UUID} , {MIG}"}, (UUID, MIG)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ("1",)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None),  # Kubernetes; numbers are counted anew inside
        ({"NVIDIA_VISIBLE_DEVICES": "4,5"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": f"{MIG},{UUID}"}, (MIG, UUID)),
        ({"HIP_VISIBLE_DEVICES": "3"}, ("3",)),
        ({"ROCR_VISIBLE_DEVICES": "4,6"}, ("0", "1")),
        ({"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}, ("1",)),
        ({"SLURM_GPUS_ON_NODE": "2"}, ("0", "1")),  # a Slurm without variables for GPUs
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2,5"}, ("2", "5")),  # a task has a part of the job's
        ({"SLURM_GPUS_ON_NODE": "0"}, ()),
        ({"SLURM_GPUS_ON_NODE": "gpu:2"}, None),
    ],
)
def test_what_a_job_system_gives_is_read_from_the_environment(
    environment: dict[str, str], given: tuple[str, ...] | None
) -> None:
    assert handed_out(environment) == given


@pytest.mark.parametrize(
    ("own", "environment", "expected"),
    [
        ("1", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("0,1", {"CUDA_VISIBLE_DEVICES": "2,5"}, {"CUDA_VISIBLE_DEVICES": "2,5"}),
        ("1", {"CUDA_VISIBLE_DEVICES": f"{UUID},{MIG}"}, {"CUDA_VISIBLE_DEVICES": MIG}),
        ("1", {"NVIDIA_VISIBLE_DEVICES": f"{UUID},{MIG}"}, {"CUDA_VISIBLE_DEVICES": MIG}),
        ("1", {"HIP_VISIBLE_DEVICES": "6,7"}, {"CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7"}),
        ("1", {"ROCR_VISIBLE_DEVICES": "6,7"}, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}),
        ("", {"CUDA_VISIBLE_DEVICES": "2,5"}, {"CUDA_VISIBLE_DEVICES": ""}),
        ("1", {"SLURM_GPUS_ON_NODE": "2"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_numbers_on_a_node_become_the_names_that_were_handed_out(
    own: str, environment: dict[str, str], expected: dict[str, str]
) -> None:
    assert with_own_gpus({"CUDA_VISIBLE_DEVICES": own, "A": "b"}, environment) == {**expected, "A": "b"}


def test_a_process_without_gpus_of_its_own_keeps_what_it_inherits() -> None:
    assert with_own_gpus({"A": "b"}, {"CUDA_VISIBLE_DEVICES": "2,5"}) == {"A": "b"}


def test_a_gpu_that_was_not_handed_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="GPU 2 is required, but this machine assigns only 2: 3,7"):
        with_own_gpus({"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "3,7"})


def test_gpus_are_counted_by_their_files_and_by_what_was_handed_out(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    assert gpus_here({}, tmp_path) == 2
    assert gpus_here({"CUDA_VISIBLE_DEVICES": "11"}, tmp_path) == 1
    assert gpus_here(HIDDEN, tmp_path) == 0


def test_gpus_of_amd_are_counted_where_their_devices_are(tmp_path: Path) -> None:
    """A node of the processor, two GPUs, and one that the container was not given."""
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/card0"):
        (tmp_path / "dev" / name).touch()
    nodes = {"0": (0, 0), "1": (304, 128), "2": (304, 129), "3": (304, 130)}
    for name, (simds, minor) in nodes.items():
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / name
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\ndrm_render_minor {minor}\n")
    assert gpus_here({}, tmp_path) == 2
    (tmp_path / "dev/kfd").unlink()
    assert gpus_here({}, tmp_path) == 0
