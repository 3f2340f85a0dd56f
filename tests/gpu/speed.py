"""Train steps of a 0.6B model: against a transformers loop, with activations computed again, with offload between."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.trainer.commands import TrainerRank
from actors.trainer.models.config import read_hf_config
from tests.bench.bench_transformers import plain_loop
from tests.gpu.measured import Measured, forget_peak, peak_bytes, seconds, used_bytes
from tests.gpu.model import Work, operations, peak_of, work

STEPS = 4  # the first warms up
WIDTHS = (256, 4096)  # of the loop's length buckets, in tokens: the faster one counts
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
SAME_LOSS = 1e-2
FREED = 0.9  # at least, of what was offloaded


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


def offload(device: str, *, tiny: bool = False) -> Measured:
    """Seconds and bytes off the device and back, and what a step after it differs by from one without."""
    with tempfile.TemporaryDirectory() as folder:
        asked = work(Path(folder), device, tiny=tiny, steps=2)
        losses: list[float] = []
        numbers: dict[str, Any] = {}
        for moves in (False, True):
            forget_peak(device)
            (run := Path(folder) / f"run-{moves}").mkdir()
            engine = TrainerRank(asked.topology, run)
            engine.train(asked.batches[0])
            if moves:
                before = used_bytes(device)
                moved: list[int] = []
                numbers["offload_s"] = seconds(lambda: moved.append(engine.offload()), device, times=1)  # noqa: B023
                numbers["bytes"], after = moved[0], used_bytes(device)
                numbers["freed_bytes"] = None if before is None or after is None else before - after
                numbers["onload_s"] = seconds(engine.onload, device, times=1)
            losses.append(engine.train(asked.batches[1]).metrics["train/loss"])
            engine.close()
    numbers["loss_apart"] = abs(losses[0] - losses[1])
    problems = [f"the loss after it differs by {numbers['loss_apart']}"] if numbers["loss_apart"] > SAME_LOSS else []
    if numbers["freed_bytes"] is not None and numbers["freed_bytes"] < FREED * numbers["bytes"]:
        problems.append(f"{numbers['freed_bytes']} of {numbers['bytes']} bytes were freed")
    return Measured(numbers, problems)


def _ours(asked: Work, run: Path, device: str) -> dict[str, Any]:
    forget_peak(device)
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
