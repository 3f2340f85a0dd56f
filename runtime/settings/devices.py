"""GPUs of this machine: those that the run may use, and the variables that assign them to processes.

A scheduler may have assigned GPUs already: Slurm and Kubernetes set them in the environment, by index, UUID or MIG
slice name. GPU 0 of a node is then the first of those. A Slurm that sets no such variable still says how many GPUs the
job has, and its devices are then numbered from 0.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

NVIDIA: Final = "CUDA_VISIBLE_DEVICES"  # assigns GPUs to our processes; AMD's runtime reads it too
AMD: Final = "HIP_VISIBLE_DEVICES"
BELOW_AMD: Final = "ROCR_VISIBLE_DEVICES"  # applied first: the others index the GPUs that it leaves
MOUNTED: Final = "NVIDIA_VISIBLE_DEVICES"  # GPUs of a container: "all", indices (already renumbered), or names
SLURM_COUNT: Final = "SLURM_GPUS_ON_NODE"  # of the job, on this node
HIDDEN: Final = {NVIDIA: "", AMD: ""}  # environment of a process that must not see a GPU
KEPT_PRODUCTS: Final = "64"  # shapes of a product of matrices; a step repeats few in all layers
ON_CPU: Final = {  # environment of actors and tiny engines that compute on the CPU
    **HIDDEN,
    # oneDNN, which computes in bfloat16, keeps 0.6 MB for each shape, and ideep in torch keeps the same again: without
    # a limit 1,024 of them, and batches differ in shape.
    "LRU_CACHE_CAPACITY": KEPT_PRODUCTS,
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KEPT_PRODUCTS,
    # The C library keeps freed memory for the next tensor: a fresh page costs 2 microseconds, and a step took a million
    # of them. The trainer gives back after each step what is free, the tiny engine after new weights.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 27),  # bytes: larger tensors are given back at once and leave no gaps
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),  # the largest that `mallopt` takes
    "MALLOC_ARENA_MAX": "1",  # those of threads give back each 64 MB that is free
}
KFD: Final = Path("sys/class/kfd/kfd/topology/nodes")


def handed_out(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of the GPUs that a scheduler assigned to us; None if it assigned none explicitly."""
    for variable in (NVIDIA, AMD):
        if variable in environment:
            return _names(environment[variable])
    if BELOW_AMD in environment:
        return tuple(str(index) for index in range(len(_names(environment[BELOW_AMD]))))
    mounted = _names(environment.get(MOUNTED, ""))
    if mounted and all(name.startswith(("GPU-", "MIG-")) for name in mounted):
        return mounted
    count = environment.get(SLURM_COUNT, "")
    return tuple(str(index) for index in range(int(count))) if count.isascii() and count.isdigit() else None


def _names(text: str) -> tuple[str, ...]:
    """Return the entries of a GPU list. An entry such as "-1" hides itself and all entries after it."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-") or name in ("none", "void", "NoDevFiles"):
            break
        names.append(name)
    return tuple(names)


def with_own_gpus(own: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Translate the GPU indices in a process's variables into the names that this machine uses.

    Args:
        own: variables of the process; they stay as they are if they assign no GPUs.
        environment: variables of the node daemon that starts the process.

    Raises:
        ValueError: a GPU index is outside of those assigned to us.
    """
    wanted, given = own.get(NVIDIA), handed_out(environment)
    if wanted is None or wanted == "":
        return dict(own)
    indices = [int(index) for index in wanted.split(",")]
    if given is not None and max(indices) >= len(given):
        raise ValueError(
            f"GPU {max(indices)} is required, but this machine assigns only {len(given)}: {','.join(given)}"
        )
    names = ",".join(str(index) if given is None else given[index] for index in indices)
    is_amd = AMD in environment or BELOW_AMD in environment
    return {**own, NVIDIA: names, **({AMD: names} if is_amd else {})}


def gpus_here(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Count the GPUs that we may use: those assigned, else all NVIDIA and AMD device files. Calls no driver."""
    given = handed_out(environment)
    if given is not None:
        return len(given)
    files = sum(1 for entry in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name))
    return files + sum(1 for _ in _amd_gpus(root))


def _amd_gpus(root: Path) -> Iterator[Path]:
    """Yield the GPU nodes of AMD's driver whose device exists here: a container may have only some."""
    if not (root / "dev/kfd").exists():
        return
    for node in (root / KFD).glob("*/properties"):
        properties = dict(line.split() for line in node.read_text().splitlines() if len(line.split()) == 2)
        is_gpu = int(properties.get("simd_count", "0")) > 0  # a CPU's node has none
        if is_gpu and (root / f"dev/dri/renderD{properties.get('drm_render_minor', '')}").exists():
            yield node
