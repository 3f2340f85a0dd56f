"""The two stacks under SGLang's own server, and which of them the interpreter of this session has.

`locked` is .venv-sglang: SGLang on the torch and transformers of our own lock, with what a text model needs on the CPU.
`upstream` is .venv-sglang-upstream: all that `pip install` brings, which is what its makers ask for and users have.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from tests.sglang.server import sglang_python

SAID: Final = ("sglang", "torch", "transformers", "sglang-kernel", "torchvision")  # if installed
NAMES_AND_NEEDS: Final = """
import importlib.metadata as metadata, json
found = {item.metadata["Name"]: (item.version, item.requires or []) for item in metadata.distributions()}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Stack:
    """What an environment holds beside what SGLang asks for."""

    name: str
    environment: str
    left_out: frozenset[str] = frozenset()  # packages that SGLang asks for
    other_versions: frozenset[str] = frozenset()  # packages of which SGLang asks for another version

    @property
    def lock_name(self) -> str:
        return f"{self.environment}.lock"


# What a server of text models on the CPU does without: kernels for GPUs, hubs, other formats of models and of media.
LOCKED: Final = Stack(
    "locked",
    "sglang",
    left_out=frozenset(
        "anthropic blobfile build cuda-python datasets deepseek-recipe easydict flash-attn-4 flashinfer-python "
        "humming-kernels interegular kernels llguidance mistral-common modelscope ninja numba nvidia-cutlass-dsl "
        "nvidia-mathdx nvidia-ml-py nvshmem4py-cu13 openai-harmony outlines py-spy python-dateutil quack-kernels scipy "
        "sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel smg-grpc-servicer tiktoken tilelang timm tml-renderers "
        "torch-memory-saver torchaudio torchcodec watchfiles xxhash zstandard".split()
    ),
    other_versions=frozenset({"sentencepiece", "soundfile", "tokenizers", "torch", "transformers"}),
)
UPSTREAM: Final = Stack("upstream", "sglang-upstream")
STACKS: Final = (LOCKED, UPSTREAM)


def stack() -> Stack:
    """The stack of this session's interpreter, by the name of its environment; `LOCKED` if that is another one."""
    environment = Path(sglang_python()).parents[1].name.removeprefix(".venv-")
    return next((stack for stack in STACKS if stack.environment == environment), LOCKED)


@cache
def installed() -> dict[str, tuple[str, list[str]]]:
    """Version and requirements of all packages of SGLang's interpreter."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [sglang_python(), "-I", "-c", NAMES_AND_NEEDS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {canonicalize_name(name): (version, needs) for name, (version, needs) in found.items()}


def versions() -> str:
    """The stack and its versions in one line, for pages of results."""
    if not Path(sglang_python()).exists():
        return f"SGLang's stack: {stack().name}, not installed"
    return ", ".join(
        [f"SGLang's stack: {stack().name}", *(f"{n} {installed()[n][0]}" for n in SAID if n in installed())]
    )
