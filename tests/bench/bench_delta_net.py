"""One gated delta net on the CPU as its sample grows, and transformers' torch form: CPU seconds, peak memory, ratios.

Run: python -m tests.bench.bench_delta_net. Convolution and gated delta rule, forward and backward pass, each length in
a fresh process, as JSON.
"""

import argparse
import json
import multiprocessing
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.data.context import Context
from actors.trainer.megatron.layers.blockwise import Row
from actors.trainer.megatron.layers.delta_rule import Chunks, convolved, delta_rule
from tests.bench.bench_attention import measured
from tests.bench.rig import rounded

HEADS, SHARED, KEY, VALUE, WIDTH = 1, 2, 64, 64, 4
WARM_UP = 256  # tokens, so that what the first calls load does not count


def case(tokens: int, own: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    _both_passes(WARM_UP, own)
    return _both_passes(tokens, own)


def _both_passes(tokens: int, own: bool) -> dict[str, float]:
    channels = HEADS * (2 * KEY + SHARED * VALUE)
    mixed = torch.randn(tokens, channels).requires_grad_()
    decay = (-torch.rand(tokens, HEADS, SHARED)).requires_grad_()
    rate = torch.rand(tokens, HEADS, SHARED).requires_grad_()
    weight = torch.randn(channels, WIDTH).requires_grad_()
    layer = _own if own else _of_transformers
    return measured(lambda: layer(mixed, weight, decay, rate), [mixed, decay, rate])


def _split(mixed: Tensor) -> list[Tensor]:
    query, key, value = mixed.split([HEADS * KEY, HEADS * KEY, HEADS * SHARED * VALUE], -1)
    return [query.unflatten(-1, (HEADS, KEY)), key.unflatten(-1, (HEADS, KEY)), value.unflatten(-1, (-1, VALUE))]


def _own(mixed: Tensor, weight: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    chunks = Chunks.of(Row.of(np.array([len(mixed)]), Context(), None), mixed.device)
    query, key, value = _split(F.silu(convolved(mixed, weight, chunks)))
    return delta_rule(query, key, value.unflatten(1, (HEADS, SHARED)), decay, rate, chunks)


def _of_transformers(mixed: Tensor, weight: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    out: Any = theirs.causal_conv1d_fn(mixed.t()[None], weight, activation="silu")
    query, key, value = (each[None] for each in _split(out[0].t()))
    rates = {"g": decay.flatten(1)[None], "beta": rate.flatten(1)[None]}
    return theirs.torch_chunk_gated_delta_rule(query, key, value, **rates, use_qk_l2norm_in_kernel=True)[0]


def alone(tokens: int, own: bool) -> dict[str, float]:
    """A case in a process of its own, so that no other's memory counts."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(case, (tokens, own))


def measure(tokens: int, times: int, theirs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": tokens, "times": times}
    for name, own in (("own", True), ("transformers", False))[: 1 + theirs]:
        short, long = alone(tokens, own), alone(tokens * times, own)
        ratios = {f"{key}_ratio": long[key] / short[key] for key in short if short[key] > 0}
        found[name] = {"short": short, "long": long, **ratios}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--times", type=int, default=8, help="as many tokens has the longer sample")
    parser.add_argument("--theirs", action="store_true", help="transformers' torch form, too: minutes")
    args = parser.parse_args(argv)
    print(json.dumps(rounded(measure(args.tokens, args.times, args.theirs)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
