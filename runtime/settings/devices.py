"""Which GPUs this machine has for us, and how a process is told which are its own.

A job system may have handed some out already: Slurm and Kubernetes say so in the environment, by number, UUID or the
name of a MIG slice. GPU 0 of a node is then the first of those.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

NVIDIA: Final = "CUDA_VISIBLE_DEVICES"  # what processes of ours are told their GPUs by; AMD's runtime reads it too
AMD: Final = "HIP_VISIBLE_DEVICES"
BELOW_AMD: Final = "ROCR_VISIBLE_DEVICES"  # filters before, so that the others count what it leaves
MOUNTED: Final = "NVIDIA_VISIBLE_DEVICES"  # what a container has: "all", numbers (already counted anew), or names
HIDDEN: Final = {NVIDIA: "", AMD: ""}  # the environment of a process that is to see no GPU
KFD: Final = Path("sys/class/kfd/kfd/topology/nodes")


def handed_out(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that a job system has given us, as it names them; None if it says nothing."""
    for variable in (NVIDIA, AMD):
        if variable in environment:
            return _names(environment[variable])
    if BELOW_AMD in environment:
        return tuple(str(index) for index in range(len(_names(environment[BELOW_AMD]))))
    mounted = _names(environment.get(MOUNTED, ""))
    return mounted if mounted and all(name.startswith(("GPU-", "MIG-")) for name in mounted) else None


def _names(text: str) -> tuple[str, ...]:
    """The entries before the first that hides it and the rest, as "-1" does."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name or name.startswith("-") or name in ("none", "void", "NoDevFiles"):
            break
        names.append(name)
    return tuple(names)


def with_own_gpus(own: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process with its GPUs, numbers on its node, as the machine names them.

    Args:
        own: variables of the process; without GPUs among them they stay as they are.
        environment: of the agent that starts it.

    Raises:
        ValueError: it is to have a GPU that we were not given.
    """
    wanted, given = own.get(NVIDIA), handed_out(environment)
    if wanted is None or wanted == "":
        return dict(own)
    indices = [int(index) for index in wanted.split(",")]
    if given is not None and max(indices) >= len(given):
        raise ValueError(f"GPU {max(indices)} is asked for, and this machine gives us {len(given)}: {','.join(given)}")
    names = ",".join(str(index) if given is None else given[index] for index in indices)
    is_amd = AMD in environment or BELOW_AMD in environment
    return {**own, NVIDIA: names, **({AMD: names} if is_amd else {})}


def gpus_here(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Count the GPUs that we may use: those handed out, else those of NVIDIA and AMD by their files; asks no driver."""
    given = handed_out(environment)
    if given is not None:
        return len(given)
    files = sum(1 for entry in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name))
    return files + sum(1 for _ in _amd_gpus(root))


def _amd_gpus(root: Path) -> Iterator[Path]:
    """Nodes of AMD's driver that compute and whose device is here: a container may have some of them."""
    if not (root / "dev/kfd").exists():
        return
    for node in (root / KFD).glob("*/properties"):
        properties = dict(line.split() for line in node.read_text().splitlines() if len(line.split()) == 2)
        is_gpu = int(properties.get("simd_count", "0")) > 0  # a processor's node has none
        if is_gpu and (root / f"dev/dri/renderD{properties.get('drm_render_minor', '')}").exists():
            yield node
