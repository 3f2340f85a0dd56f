"""A layer asks the device nothing: what it wants to know of a packed row is computed once, before the first layer."""

import json
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.trainer.data.batch import MicroBatch, make_micro_batch
from actors.trainer.data.context import Context
from actors.trainer.megatron.layers import attention
from actors.trainer.megatron.layers.rows import PackedRow
from actors.trainer.megatron.rank_model import Replica, TokenOutputs
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import OF_KIND, TINY, random_batch
from tests.build.topology import MakeTopology

MICRO_BATCH = 3  # questions before and behind the layers
ANSWERS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")
KINDS: dict[str, dict[str, Any]] = {"qwen3": {}, "deepseek_v3": OF_KIND["deepseek_v3"]}


@dataclass
class Questions:
    """Calls for which a GPU's caller waits, or copies from host memory."""

    counted: Counter[str] = field(default_factory=Counter[str])
    counts: bool = True

    @contextmanager
    def watched(self) -> Generator[None]:
        with self._patched(ANSWERS, lambda *_, **__: True), self._patched(("to",), _names_a_device):
            yield

    @contextmanager
    def _patched(self, names: tuple[str, ...], asks: Callable[..., bool]) -> Generator[None]:
        if not names:
            yield
            return
        name, *others = names
        original = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
            if self.counts and asks(*args, **options):
                self.counted[name] += 1
            return original(tensor, *args, **options)

        with mock.patch.object(Tensor, name, call), self._patched(tuple(others), asks):
            yield


def _names_a_device(*args: Any, **options: Any) -> bool:
    return "device" in options or any(isinstance(value, (torch.device, str)) for value in args)


def lower_right(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Which keys the queries see, the last of which sees the last key: a number of keys before it, and itself."""
    before = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (before >= 0) & ((before <= window[0]) | (window[0] < 0))


def one_by_one(questions: Questions) -> Callable[..., Tensor]:
    """In the place of torch's kernel, which no CPU has: attention by the bounds that it would be given."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        *lengths: int,
        scale: Any,
        window_size: tuple[int, int],
        **_: Any,
    ) -> Tensor:
        assert all(isinstance(length, int) for length in lengths)
        questions.counts = False
        cuts = [each.diff().tolist() for each in (bounds, key_bounds)]
        parts = [
            tensor.split(sizes) for tensor, sizes in zip((query, key, value), (cuts[0], cuts[1], cuts[1]), strict=True)
        ]
        found = [
            F.scaled_dot_product_attention(
                *(tensor.transpose(0, 1)[None] for tensor in sequence),
                lower_right(len(sequence[0]), len(sequence[1]), window_size),
                scale=scale,
                enable_gqa=query.size(1) != key.size(1),
            )[0].transpose(0, 1)
            for sequence in zip(*parts, strict=True)
        ]
        questions.counts = True
        return torch.cat(found)

    return attend


def asked(topology: Topology, *, kernel: bool) -> tuple[Counter[str], Tensor]:
    """What a packed micro-batch's forward and backward pass ask, and its log-probs."""
    torch.manual_seed(0)
    replica, batch, questions = Replica(topology, torch.device("cpu")), random_batch(), Questions()
    micro_batch = make_micro_batch(batch, np.arange(8), packed=True)
    seen: list[Tensor] = []

    def loss(_: MicroBatch, outputs: TokenOutputs) -> Tensor:
        seen.append(outputs.log_probs.detach().clone())
        return outputs.log_probs.sum()

    with (
        mock.patch.object(attention, "_has_kernel", return_value=kernel),
        mock.patch.object(attention, "varlen_attn", one_by_one(questions)),
    ):
        replica.backward([micro_batch], loss)  # the first time frequencies are brought to the device
        with questions.watched():
            replica.backward([micro_batch], loss)
    return questions.counted, seen[0]


@pytest.mark.parametrize("kernel", [False, True], ids=["dense mask", "kernel"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_packed_row_asks_the_device_nothing(
    make_topology: MakeTopology, model_dir: Path, kind: str, kernel: bool, recomputes: bool
) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    topology = make_topology(trainer={"packed": True, "megatron": full if recomputes else {}})
    counted: dict[int, Counter[str]] = {}
    for layers in (1, 3):
        sizes = {"num_hidden_layers": layers}
        if kind == "deepseek_v3":  # whose last layer has experts
            sizes = {"num_hidden_layers": layers + 1, "first_k_dense_replace": layers}
        config = TINY | KINDS[kind] | {"model_type": kind} | sizes
        (model_dir / "config.json").write_text(json.dumps(config))
        counted[layers], _ = asked(topology, kernel=kernel)
    assert counted[3] - counted[1] == Counter()
    if kind == "qwen3":
        assert sum(counted[1].values()) <= MICRO_BATCH, counted[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_given_the_bounds_of_the_dense_mask(
    make_topology: MakeTopology, model_dir: Path, kind: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps(TINY | KINDS[kind] | {"model_type": kind}))
    masked, varied = (asked(make_topology(trainer={"packed": True}), kernel=kernel)[1] for kernel in (False, True))
    torch.testing.assert_close(varied, masked)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_kernel_sees_a_part_of_a_sequence_as_the_dense_mask_does(rank: int, window: int | None) -> None:
    lengths, context = np.array([4, 12, 8]), Context(rank, 2)
    row = PackedRow(lengths, context, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(12, 4, 8, generator=draw)
    key, value = (torch.randn(24, 2, 8, generator=draw) for _ in range(2))
    layer = attention.CoreAttention(None, 1, None, "self", window=window)
    mask = row.mask(window)
    with mock.patch.object(attention, "varlen_attn", one_by_one(Questions())):
        found = layer._halves(query, key, value, row)
    torch.testing.assert_close(found, layer._masked(query[:, None], key[:, None], value[:, None], mask)[:, 0])
