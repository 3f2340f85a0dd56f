"""Attention in blocks on the CPU against torch's fused causal attention: CPU seconds, peak memory, ratios as JSON.

Run: python -m tests.bench.bench_attention. Forward and backward pass of one layer, each in a fresh process.
"""

import argparse
import ctypes
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.data.context import Context
from actors.trainer.megatron.layers.blockwise import Row, blockwise
from tests.bench.rig import rounded

HEAD_DIM = 64
WARM_UP = 2048  # tokens of a first row, which does not count
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measured(compute: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, float]:
    """CPU seconds of both passes, and MiB at their peak beyond inputs, output and gradients."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count as held before
    counter = Path("/proc/self/clear_refs")
    counter.write_text("5", encoding="ascii")  # the peak begins anew
    before, begin = _of_status("VmRSS"), time.process_time()
    out = compute()
    out.backward(torch.ones_like(out))
    took = time.process_time() - begin
    known = sum(tensor.nbytes for tensor in (out, out, *inputs)) / 2**20  # the output's gradient, and the inputs'
    return {"cpu_s": took, "further_mib": _of_status("VmHWM") - before - known}


def _of_status(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1024


def case(lengths: list[int], window: int | None, heads: int, dtype: str, fused: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    first = [min(length, WARM_UP) for length in lengths[:1]]
    for own in (first, lengths):  # the first pass of a process sets up libraries, whatever it computes
        inputs = [torch.randn(1, heads, sum(own), HEAD_DIM).to(DTYPES[dtype]).requires_grad_() for _ in range(3)]
        found = measured(lambda inputs=inputs, own=own: attention(inputs, own, window, fused), inputs)
    return found


def attention(inputs: list[Tensor], lengths: list[int], window: int | None, fused: bool) -> Tensor:
    if fused:
        return F.scaled_dot_product_attention(*inputs, is_causal=True)
    return blockwise(*inputs, Row.of(np.array(lengths), Context(), None).plan(window), None)


def alone(*args: Any) -> dict[str, float]:
    """A case in a process of its own, so that no other's memory counts."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(case, args)


def measure(tokens: int, window: int, samples: int, heads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": tokens, "window": window, "heads": heads}
    for dtype in DTYPES:
        fused = alone([tokens], None, heads, dtype, True)
        cases = {
            "windowed": alone([tokens], window, heads, dtype, False),
            "half_windowed": alone([tokens // 2], window, heads, dtype, False),
            "full": alone([tokens], None, heads, dtype, False),
            "half_full": alone([tokens // 2], None, heads, dtype, False),
            "cut_windowed": alone([tokens // samples] * samples, window, heads, dtype, False),
            "cut_full": alone([tokens // samples] * samples, None, heads, dtype, False),
        }
        found[dtype] = {
            "fused": fused,
            **cases,
            "windowed_to_fused": cases["windowed"]["cpu_s"] / fused["cpu_s"],
            "full_to_fused": cases["full"]["cpu_s"] / fused["cpu_s"],
            "cut_windowed_to_cut_full": cases["cut_windowed"]["cpu_s"] / cases["cut_full"]["cpu_s"],
            "memory_windowed": cases["windowed"]["further_mib"] / cases["half_windowed"]["further_mib"],
            "memory_full": cases["full"]["further_mib"] / cases["half_full"]["further_mib"],
        }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--samples", type=int, default=64, help="into which the row is cut")
    parser.add_argument("--heads", type=int, default=1)
    args = parser.parse_args(argv)
    print(json.dumps(rounded(measure(args.tokens, args.window, args.samples, args.heads)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
