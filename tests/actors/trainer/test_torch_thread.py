"""The torch thread: what the process that has one sees of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.trainer.torch_thread import TorchThread

ROOT = Path(__file__).parents[3]
ON_A_MACHINE_WITH_A_GPU = """
import os
import torch
torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
import asyncio
from actors.trainer.torch_thread import TorchThread
def build():
    from actors.trainer.megatron import groups
    from actors.trainer.megatron.imports import parallel_state
    groups.join(groups.Ranks(), groups.MegatronConfig(), groups.device_of("cpu", groups.Ranks()), seed=1)
    found = torch.distributed.get_backend(), str(torch.cuda.current_device())
    groups.leave()  # or gloo's threads are still there when the process ends, which may abort it
    return found
with TorchThread("cpu") as thread:
    print(*asyncio.run(thread.run(build)))
"""


@pytest.mark.parametrize(("device", "sees"), [("cpu", ""), ("cuda", "3")])
def test_only_a_rank_on_a_gpu_sees_one(device: str, sees: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    with TorchThread(device):
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["HIP_VISIBLE_DEVICES"]) == (sees, sees)


@pytest.mark.slow
def test_a_trainer_on_the_cpu_starts_on_a_machine_with_a_gpu() -> None:
    """Megatron's calls to CUDA land on the CPU though torch would find a GPU."""
    environment = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-c", ON_A_MACHINE_WITH_A_GPU]
    result = subprocess.run(command, env=environment, capture_output=True, timeout=200, check=False)
    assert result.stdout.decode().strip() == "gloo cpu", result.stderr.decode()[-2000:]


def test_the_actor_is_imported_without_torch_which_its_own_thread_imports() -> None:
    code = "import sys, actors.trainer.actor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0


COUNTED = """
import contextlib, gc, types, anyio
from actors.trainer.actor import TrainerActor
from actors.trainer.torch_thread import TorchThread

async def start():
    with TorchThread() as thread:
        phases = []
        gc.callbacks.append(lambda phase, _: phases.append(phase))
        with contextlib.suppress(AttributeError):  # behind its imports: there is no topology
            await thread.run(TrainerActor._build_rank, types.SimpleNamespace(), None, None)
        print(phases.count("start"), gc.isenabled())

anyio.run(start)
"""


@pytest.mark.slow
def test_a_rank_imports_torch_and_megatron_without_garbage_collection() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", COUNTED], env=environment, capture_output=True, check=True, text=True)
    collections, is_enabled = told.stdout.split()
    assert int(collections) < 20  # before and behind the imports, which are over 800 collections long
    assert is_enabled == "True"
