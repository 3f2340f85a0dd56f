"""Train steps of a 0.6B model: against a plain transformers loop, and with activations computed again."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.megatron import cpu
from actors.trainer.models.config import read_hf_config
from tests.bench.bench_transformers import plain_loop
from tests.gpu.measured import Measured, forget_peak, peak_bytes, seconds
from tests.gpu.model import Work, operations, peak_of, work

STEPS = 4  # the first warms up
WIDTHS = (256, 4096)  # of the loop's length buckets, in tokens: the faster one counts
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
SAME_LOSS = 1e-2


def speed(device: str, *, tiny: bool = False) -> Measured:
    """Seconds a step, MFU and bytes of both sides. Slower than the loop is no problem here, but a number."""
    with tempfile.TemporaryDirectory() as folder:
        asked = work(Path(folder), device, tiny=tiny, steps=STEPS)
        flops = _operations(asked)
        sides = {"ours": _ours(asked, Path(folder) / "run", device)}
        for width in WIDTHS:
            sides[f"loop, width {width}"] = _loop(asked, width, device)
    peak = peak_of(torch.cuda.get_device_name()) if device == "cuda" else None
    for side in sides.values():
        side["operations_per_s"] = flops / side["s"]
        side["mfu"] = None if peak is None else side["operations_per_s"] / peak
    best = min(side["s"] for name, side in sides.items() if name != "ours")
    tokens = float(asked.batches[0].lengths_B.sum())
    return Measured({"tokens": tokens, "sides": sides, "loop_by_ours": best / sides["ours"]["s"]}, [])


def recompute(device: str, *, tiny: bool = False) -> Measured:
    """Seconds and bytes without and with recomputation, which changes no loss and takes less memory."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, megatron in RECOMPUTE.items():
            asked = work(Path(folder), device, tiny=tiny, steps=STEPS, megatron=megatron)
            found[name] = _ours(asked, Path(folder) / name, device)
    problems = [
        f"{name}: loss {one['loss']}, without recomputation {found['none']['loss']}"
        for name, one in found.items()
        if abs(one["loss"] - found["none"]["loss"]) > SAME_LOSS
    ]
    if device == "cuda" and not found["full"]["peak_bytes"] < found["none"]["peak_bytes"]:
        problems.append("full recomputation takes no less memory")
    return Measured(found, problems)


def _ours(asked: Work, run: Path, device: str) -> dict[str, Any]:
    forget_peak(device)
    with cpu.CpuMode() if cpu.needed() else nullcontext():
        engine = TrainerRank(asked.topology, run)
        found = _timed(lambda batch: engine.train(batch).metrics["train/loss"], asked, device)
        engine.close()
    return found


def _loop(asked: Work, width: int, device: str) -> dict[str, Any]:
    forget_peak(device)
    train = plain_loop(asked.topology, width, device)
    return _timed(lambda batch: train(batch) or 0.0, asked, device)


def _timed(train: Callable[[Any], float], asked: Work, device: str) -> dict[str, Any]:
    batches = iter(asked.batches)
    losses = [train(next(batches))]
    took_s = seconds(lambda: losses.append(train(next(batches))), device, times=len(asked.batches) - 1)
    return {"s": took_s, "peak_bytes": peak_bytes(device), "loss": losses[-1]}


def _operations(asked: Work) -> float:
    """Of the mean timed step."""
    model = read_hf_config(Path(asked.topology.model.hf_checkpoint))
    timed = asked.batches[1:]
    counted = [operations(model, batch.lengths_B.tolist(), int(batch.loss_mask_N.sum())) for batch in timed]
    return sum(counted) / len(timed)
