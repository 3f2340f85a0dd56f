"""Attention in blocks is the plain formula with a mask, whatever the samples, the window, the sinks and the rank."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.trainer.data.batch import SharedPrompts
from actors.trainer.data.context import Context
from actors.trainer.data.prompts import PADDING, PROMPT
from actors.trainer.megatron.layers import blockwise
from actors.trainer.megatron.layers.blockwise import HIDDEN, Plan, Row

NOTHING = np.zeros(0, dtype=np.int64)


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "SHORT_ROW", 0)
    monkeypatch.setattr(blockwise, "QUERIES", (2, 8))


def seen_by(plan: Plan, queries: int, keys: int) -> Tensor:
    """How often each query sees each key."""
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for pair in plan:
        part = seen[pair.queries, pair.keys]
        visible = torch.ones_like(part) if pair.mask is None else (pair.mask > HIDDEN).long()
        part += visible.tril() if pair.is_causal else visible
    return seen


def units(drawn: list[tuple[int, list[int]]], multiple: int) -> tuple[np.ndarray, SharedPrompts]:
    """Units of a prompt's length and its samples' lengths, as data/prompts.py lays them out."""
    lengths, places, owners, number = list[int](), list[int](), list[int](), 0
    for prompt, samples in drawn:
        before = len(places)
        places += range(prompt)
        owners += [PROMPT] * prompt
        for own in samples:
            places += range(prompt, prompt + own)
            owners += [number] * own
            number += 1
        padding = -(len(places) - before) % multiple
        places += [0] * padding
        owners += [PADDING] * padding
        lengths.append(len(places) - before)
    shared = SharedPrompts(np.array(places), np.array(owners), NOTHING, (), 0)
    return np.array(lengths), shared


UNITS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(1, 25), min_size=1, max_size=3)), min_size=1, max_size=3
)


@given(UNITS, st.sampled_from([None, 1, 2, 5, 8, 11, 40]), st.sampled_from([1, 2]), st.booleans())
def test_every_pair_of_the_mask_is_computed_once(
    drawn: list[tuple[int, list[int]]], window: int | None, size: int, shares: bool
) -> None:
    lengths, shared = units(drawn, Context(0, size).multiple)
    for rank in range(size):
        row = Row.of(lengths, Context(rank, size), shared if shares else None)
        seen = seen_by(row.plan(window), len(row.kept), len(row.sequences))
        padding = torch.from_numpy(row.owners[row.kept] == PADDING)  # of no sample: what it sees is of no consequence
        assert torch.equal(seen[~padding], row.mask(window).long()[~padding])
        own = torch.arange(len(row.kept)), torch.from_numpy(row.kept)
        assert (seen[own] == 1).all()  # else its output would be NaN


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """The formula, with the sinks as the scores of one more key."""
    key, value = (each.repeat_interleave(query.size(1) // key.size(1), 1) for each in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : key.size(2)] @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 3, 8, 20])
def test_outputs_and_gradients_are_those_of_the_formula(
    window: int | None, has_sinks: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for size in (1, 2):
        row = Row.of(np.array([4, 60, 12]), Context(size - 1, size), None)
        shapes = [(2, 4, len(row.kept), 8), (2, 2, 76, 8), (2, 2, 76, 6), (4,)][: 3 + has_sinks]
        tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
        sinks: list[Any] = [tensors[3], exact[3]] if has_sinks else [None, None]
        found = blockwise.blockwise(*tensors[:3], row.plan(window), 0.3, sinks[0])
        expected = plain(*exact[:3], row.mask(window), sinks[1])
        assert found.dtype is dtype
        along = torch.randn_like(expected)
        ours = torch.autograd.grad(found, tensors, along.to(dtype))
        theirs = torch.autograd.grad(expected, exact, along.to(dtype).float())
        for one, other in zip((found, *ours), (expected, *theirs), strict=True):
            largest = float(other.detach().abs().max())
            torch.testing.assert_close(
                one.float(), other, rtol=0, atol=(1e-5 if dtype is torch.float32 else 2e-2) * largest
            )
