"""The lock of .venv-sglang: exact, and closed but for what SGLang itself asks for: of that some is left out."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sglang.server import sglang_python
from tests.test_lock import lock

ROOT: Final = Path(__file__).parent.parent
SGLANG: Final = "sglang"
# What a server of text models on the CPU does without: kernels for GPUs, hubs, other formats of models and of media.
LEFT_OUT: Final = frozenset(
    "anthropic blobfile build cuda-python datasets deepseek-recipe easydict flash-attn-4 flashinfer-python "
    "humming-kernels interegular kernels llguidance mistral-common modelscope ninja numba nvidia-cutlass-dsl "
    "nvidia-mathdx nvidia-ml-py nvshmem4py-cu13 openai-harmony outlines py-spy python-dateutil quack-kernels scipy "
    "sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel smg-grpc-servicer tiktoken tilelang timm tml-renderers "
    "torch-memory-saver torchaudio torchcodec watchfiles xxhash zstandard".split()
)
OTHER_VERSIONS: Final = {"sentencepiece", "soundfile", "tokenizers", "torch", "transformers"}  # than SGLang pins
NAMES_AND_NEEDS: Final = """
import importlib.metadata as metadata, json
found = {item.metadata["Name"]: (item.version, item.requires or []) for item in metadata.distributions()}
print(json.dumps(found))
"""


@cache
def installed() -> dict[str, tuple[str, list[str]]]:
    """Version and requirements of all that .venv-sglang holds."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sglang_python(), "-I", "-c", NAMES_AND_NEEDS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {canonicalize_name(name): (version.split("+")[0], needs) for name, (version, needs) in found.items()}


def requirements(name: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """What an installed package asks for here."""
    every = map(Requirement, installed()[name][1])
    return [
        item
        for item in every
        if item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def below(item: Requirement) -> list[Requirement]:
    return requirements(canonicalize_name(item.name), frozenset(item.extras))


def test_lock_lines_are_exact_and_sorted() -> None:
    text = (ROOT / "requirements" / "sglang.lock").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == sorted(lines, key=lambda line: line.split("==")[0])
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)


def test_torch_and_what_its_cuda_build_needs_are_those_of_the_other_locks() -> None:
    locked, cuda = lock("sglang.lock"), lock("cuda.lock")
    assert locked["torch"] == lock("laptop.lock")["torch"]
    assert {name: locked[name] for name in locked.keys() & cuda.keys()} == {"triton": cuda["triton"]}


@pytest.mark.sglang
def test_the_lock_is_what_is_installed() -> None:
    locked = lock("sglang.lock")
    assert {name: installed()[name][0] for name in locked} == locked


@pytest.mark.sglang
def test_all_but_sglang_gets_what_it_asks_for() -> None:
    locked, cuda = lock("sglang.lock"), lock("cuda.lock")
    waiting = [item for name in locked if name != SGLANG for item in requirements(name)]
    seen: set[str] = set()
    misfits: set[str] = set()
    while waiting:
        item = waiting.pop()
        name = canonicalize_name(item.name)
        if name in cuda or str(item) in seen:
            continue
        seen.add(str(item))
        if name not in locked or locked[name] not in item.specifier:
            misfits.add(str(item))
        else:
            waiting += below(item)
    assert misfits == set()


@pytest.mark.sglang
def test_of_what_sglang_asks_for_this_is_left_out_and_this_is_of_another_version() -> None:
    locked = lock("sglang.lock")
    asked = {canonicalize_name(item.name): item for item in requirements(SGLANG)}
    assert asked.keys() - locked.keys() == LEFT_OUT
    assert {
        name for name in asked.keys() & locked.keys() if locked[name] not in asked[name].specifier
    } == OTHER_VERSIONS
