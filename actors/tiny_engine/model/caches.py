"""What running requests keep of their tokens, by slot: keys and values of each layer, or the states of a linear one.

Layers of one form share a tensor. A layer with a window keeps the newest positions alone, each at its position modulo
the window: they are all that a later query sees. A linear layer keeps a state and the last inputs of its convolution,
however long the request is.

Shapes: S slots, n rows of a pass, L layers of a form, H heads, K KV heads, D head size, C capacity in tokens, B x Q
prefill.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.tiny_engine.model.layers import Chooser, Waves, chooser_rotary, growth_table, rope_table, rotary
from runtime.models.blocks import Attention, DeltaNet, Mla, ModelShape

BLOCK: Final = 512  # queries of a prefill with one mask: it takes memory in proportion to them and their keys
NEVER: Final = float("-inf")

Border = Sequence[Tensor]  # states of all linear layers behind the tokens of a request


class Keys(NamedTuple):
    """Form of a layer's keys and values."""

    heads: int
    width: int  # numbers of a head and position
    window: int | None  # positions that are kept; None: all

    def columns(self, capacity: int) -> int:
        """Return the number of positions that are kept of a request with so many tokens."""
        return capacity if self.window is None else min(capacity, self.window)


def form_of(block: Attention | Mla | DeltaNet) -> Keys | DeltaNet:
    """Return the form of what a layer keeps. The block itself stands for that of a linear layer."""
    if isinstance(block, Mla):
        own = 0 if block.indexer is None or block.indexer.is_shared else block.indexer.head_dim
        return Keys(1, block.key_value_rank + block.rotated_dim + own, None)
    return block if isinstance(block, DeltaNet) else Keys(2 * block.kv_heads, block.head_dim, block.window)


def keys_and_values(block: Attention | Mla, stored: Tensor) -> Sequence[Tensor]:
    """Split what a layer keeps, [n, heads, positions, width], into the keys and the values of each KV head."""
    if isinstance(block, Mla):
        return stored[..., : block.key_value_rank + block.rotated_dim], stored[..., : block.key_value_rank]
    return stored.chunk(2, 1)


def chooser_keys(block: Attention | Mla, stored: Tensor) -> Tensor:
    """Return the keys of the scores that choose keys, [n, positions, size], of what a layer keeps."""
    assert isinstance(block, Mla)
    return stored[:, 0, :, block.key_value_rank + block.rotated_dim :]


def scale_of(block: Attention | Mla) -> float | None:
    """Return the factor of a layer's scores. None: the inverse root of the head size."""
    if isinstance(block, Attention):
        return block.scale
    yarn = block.rope.yarn  # a latent is longer than a head that is expanded from it
    return block.head_dim**-0.5 * (1.0 if yarn is None else yarn.mscale_of(yarn.mscale_all_dim) ** 2)


class Caches:
    """The caches of all layers, and the tables of their rotary embeddings."""

    def __init__(self, config: ModelShape, *, num_slots: int, dtype: torch.dtype) -> None:
        """Set up without memory, which `allocate` takes.

        Args:
            config: shape of the model.
            num_slots: S.
            dtype: of keys, values and inputs of convolutions; states are float32.
        """
        self.blocks = [layer.attention for layer in config.layers]
        self.forms = [form_of(block) for block in self.blocks]
        self.capacity = 0
        self._num_slots = num_slots
        self.dtype = dtype
        self._stores: dict[Keys, Tensor] = {}
        self._states: dict[DeltaNet, tuple[Tensor, Tensor]] = {}
        self._windows = [form.window for form in self.forms if isinstance(form, Keys) and form.window is not None]
        self.allocate(0, is_used=False)

    def allocate(self, capacity: int, *, is_used: bool) -> None:
        """Make every slot so many tokens long, and keep what is in them if they are used."""
        size, old = self._num_slots, self._stores if is_used else {}
        # Zeros, not empty: attention multiplies masked positions by 0, and 0 * NaN is NaN.
        self._stores = {
            form: torch.zeros(
                self.forms.count(form), size, form.heads, form.columns(capacity), form.width, dtype=self.dtype
            )
            for form in dict.fromkeys(self.forms)
            if isinstance(form, Keys)
        }
        for form, store in old.items():
            self._stores[form][:, :, :, : store.shape[3]] = store
        if not is_used:
            linear = (form for form in dict.fromkeys(self.forms) if isinstance(form, DeltaNet))
            self._states = {block: self._new_states(block, size if capacity else 0) for block in linear}
        numbers = [self.forms[:index].count(form) for index, form in enumerate(self.forms)]
        self._layers = [
            (self._stores[form][number],)
            if isinstance(form, Keys)
            else tuple(each[number] for each in self._states[form])
            for form, number in zip(self.forms, numbers, strict=True)
        ]
        self._flat = [layer[0].view(-1, layer[0].shape[-1]) for layer in self._layers]  # a row per head and position
        self.capacity = capacity
        self._tabulate()

    def _new_states(self, block: DeltaNet, size: int) -> tuple[Tensor, Tensor]:
        """Make the states [L, S, G, r, K, V] and the inputs [L, S, width - 1, channels] of linear layers."""
        num = self.forms.count(block)
        state = torch.zeros(num, size, block.key_heads, block.shared, block.key_dim, block.value_dim)
        return state, torch.zeros(num, size, block.width - 1, block.channels, dtype=self.dtype)

    def _tabulate(self) -> None:
        """Compute the tables of rotary embeddings, in the dtype to compute in, as transformers does."""
        capacity = self.capacity
        ropes = {rope for block in self.blocks if (rope := rotary(block)) is not None}
        ropes |= {
            chooser_rotary(block, block.indexer) for block in self.blocks if isinstance(block, Mla) and block.indexer
        }
        self._ropes = {rope: rope_table(*rope, capacity).to(self.dtype) for rope in ropes}
        growths = {rope: growth_table(rope[0], capacity) for rope in ropes}
        self._growths = {rope: growth.to(self.dtype) for rope, growth in growths.items() if growth is not None}
        self.range = torch.arange(capacity)

    def waves(self, places: Tensor | slice) -> Waves:
        """Return cosines and sines of positions, by rotary embedding."""
        chosen = {rope: table[places] for rope, table in self._ropes.items()}
        growths = {rope: table[places] for rope, table in self._growths.items()}
        return {rope: (table[:, 0], table[:, 1], growths.get(rope)) for rope, table in chosen.items()}

    def kept(self, index: int) -> tuple[Tensor, ...]:
        """Return what a layer keeps: keys and values [S, heads, positions, width], or states and inputs, [S, ...]."""
        return self._layers[index]

    def rows(self, index: int) -> Tensor:
        """Return the keys and values of a layer as [S * heads * positions, width]."""
        return self._flat[index]

    def move(self, movers: Sequence[int], holes: Sequence[int], used: int) -> None:
        """Move slots with at most `used` tokens into others."""
        for store in self._stores.values():
            store[:, holes, :, :used] = store[:, movers, :, :used]
        for store in self._all_states():
            store[:, holes] = store[:, movers]

    def copy(self, sources: Sequence[int], borders: Sequence[Border], first: int, longest: int) -> None:
        """Fill the slots from `first` on with keys and values of others, and with the states behind their prompts.

        Args:
            sources: a slot for each.
            borders: of each source.
            first: slot.
            longest: most tokens that are copied of one.
        """
        rows, own = torch.tensor(sources), slice(first, first + len(sources))
        for store in self._stores.values():
            for layer in store:
                layer[own, :, :longest] = layer[rows, :, :longest]
        for number, store in enumerate(self._all_states()):
            store[:, own] = torch.stack([border[number] for border in borders], 1)

    def has_first(self, num_tokens: int, num_kept: int) -> bool:
        """Whether a slot with `num_kept` tokens still has the keys that a token behind its first `num_tokens` sees."""
        return all(num_kept <= max(window, num_tokens + 1) for window in self._windows)

    def borders(self, slots: range) -> list[Border]:
        """Return copies of the states of slots."""
        return [[store[:, slot].clone() for store in self._all_states()] for slot in slots]

    def clear(self) -> None:
        """Set all to zero."""
        for store in (*self._stores.values(), *self._all_states()):
            store.zero_()

    def _all_states(self) -> list[Tensor]:
        return [store for pair in self._states.values() for store in pair]


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention with a mask that is added to the scores.

    Args:
        queries: [n, H, Q, D].
        keys: [n, H, positions, D].
        values: [n, H, positions, size of values].
        mask: 0 or -infinity; it broadcasts against [n, H, Q, positions].
        scale: of scores.
        sinks: scores that take a share without a value; they broadcast against [n, H, Q, 1].
    """
    if sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    scores = queries @ keys.transpose(-1, -2) * (queries.shape[-1] ** -0.5 if scale is None else scale) + mask
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :-1] @ values


def _chosen(topk: int, scored: tuple[Tensor, Tensor], keys: Tensor, mask: Tensor) -> Tensor:
    """Hide keys from queries that do not choose them.

    Args:
        topk: number of keys that each query chooses.
        scored: queries [n, Q, heads, size] and weights of the heads [n, Q, heads].
        keys: of the scores, [n, positions, size].
        mask: of keys that are not seen at all; it broadcasts against [n, Q, positions].

    Returns:
        A mask [n, 1, Q, positions].
    """
    queries, weights = scored
    if topk >= keys.shape[1]:
        return mask.expand(len(keys), -1, -1).unsqueeze(1)
    products = (queries.float().flatten(1, 2) @ keys.float().transpose(1, 2)).relu()
    scores = (weights.unsqueeze(-2) @ products.unflatten(1, queries.shape[1:3])).squeeze(-2) + mask
    top = scores.topk(topk, dim=-1).indices
    return (torch.full_like(scores, NEVER).scatter_(-1, top, 0.0) + mask).unsqueeze(1).to(mask.dtype)


class Prefill:
    """A pass over whole prompts, which are padded behind their ends: the slots from `first` on get them."""

    def __init__(self, caches: Caches, first: int, lengths: Sequence[int]) -> None:
        self._caches = caches
        self._own = slice(first, first + len(lengths))
        self._longest = max(lengths)
        self._ends = torch.tensor(lengths)
        self.lengths = None if min(lengths) == self._longest else self._ends
        self.waves = caches.waves(slice(self._longest))
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._choices: dict[int, Tensor] = {}  # masks of what the last layer with scores chose, by block of queries

    def attend(
        self, index: int, queries: Tensor, stored: Tensor, sinks: Tensor | None = None, chooser: Chooser | None = None
    ) -> Tensor:
        """Compute attention of prompts. What is after a prompt's end is never used."""
        block, form = self._caches.blocks[index], self._caches.forms[index]
        assert isinstance(form, Keys)
        assert not isinstance(block, DeltaNet)
        new = stored.transpose(1, 2)  # [B, heads, Q, width]
        self._store(index, new, form.window)
        keys, values = keys_and_values(block, new)
        repeats = block.heads // keys.shape[1]
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        queries, scale = queries.transpose(1, 2), scale_of(block)
        window = None if form.window is None or form.window >= self._longest else form.window
        if window is None and sinks is None and chooser is None:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
            return mixed.transpose(1, 2).flatten(2)
        sinks = None if sinks is None else sinks[:, None, None]
        found: list[Tensor] = []
        for begin in range(0, self._longest, BLOCK):
            seen = slice(0 if window is None else max(0, begin - window + 1), begin + BLOCK)
            mask = self._mask(begin, seen, window)
            if chooser is not None:
                if chooser.scored is not None:
                    rows, weights = (each[:, begin : begin + BLOCK] for each in chooser.scored)
                    scored = chooser_keys(block, new[:, :, seen])
                    self._choices[begin] = _chosen(chooser.topk, (rows, weights), scored, mask)
                mask = self._choices[begin]
            parts = (queries[:, :, begin : begin + BLOCK], keys[:, :, seen], values[:, :, seen])
            found.append(_attention(*parts, mask, scale, sinks))
        return torch.cat(found, 2).transpose(1, 2).flatten(2)

    def _mask(self, begin: int, seen: slice, window: int | None) -> Tensor:
        """Return the mask [queries, keys] of a block of queries."""
        key = begin, window
        if key not in self._masks:
            places = self._caches.range[: self._longest]
            apart = places[begin : begin + BLOCK, None] - places[seen]
            hidden = apart < 0 if window is None else (apart < 0) | (apart >= window)
            self._masks[key] = torch.zeros(hidden.shape, dtype=self._caches.dtype).masked_fill_(hidden, NEVER)
        return self._masks[key]

    def _store(self, index: int, new: Tensor, window: int | None) -> None:
        """Keep keys and values of prompts; of long ones the newest that a window shows."""
        (kept,) = self._caches.kept(index)
        if window is None or self._longest <= window:
            kept[self._own, :, : self._longest] = new
            return
        last = self._ends[:, None] - 1
        places = (last - (last - self._caches.range[:window]) % window).clamp(min=0)
        kept[self._own] = new.gather(2, places[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))

    def recall(self, index: int) -> tuple[Tensor, Tensor]:
        """Return states of zeros."""
        state, inputs = (torch.zeros_like(each[self._own]) for each in self._caches.kept(index))
        return state, inputs

    def keep(self, index: int, state: Tensor, inputs: Tensor) -> None:
        """Store the states behind the prompts."""
        for kept, new in zip(self._caches.kept(index), (state, inputs), strict=True):
            kept[self._own] = new


class Decode:
    """A pass over one token of each running request, in the first slots."""

    lengths: None = None

    def __init__(self, caches: Caches, positions: Tensor) -> None:
        """Prepare a pass.

        Args:
            caches: long enough.
            positions: of the tokens, [n].
        """
        self._caches = caches
        self._positions = positions
        self._num = len(positions)
        self._longest = int(positions.max()) + 1
        self.waves = caches.waves(positions)
        self._places: dict[Keys, tuple[Tensor, Tensor]] = {}
        self._choice = torch.empty(0)  # mask of what the last layer with scores chose

    def attend(
        self, index: int, queries: Tensor, stored: Tensor, sinks: Tensor | None = None, chooser: Chooser | None = None
    ) -> Tensor:
        """Compute attention of each token to those of its request that its layer keeps."""
        block, form = self._caches.blocks[index], self._caches.forms[index]
        assert isinstance(form, Keys)
        assert not isinstance(block, DeltaNet)
        if form not in self._places:
            self._places[form] = self._new_places(form)
        rows, mask = self._places[form]
        self._caches.rows(index).index_copy_(0, rows, stored.reshape(-1, form.width))
        kept = self._caches.kept(index)[0][: self._num, :, : mask.shape[-1]]
        keys, values = keys_and_values(block, kept)
        if chooser is not None:
            if chooser.scored is not None:
                rows, weights = (each.unsqueeze(1) for each in chooser.scored)
                self._choice = _chosen(chooser.topk, (rows, weights), chooser_keys(block, kept), mask[:, 0])
            mask = self._choice
        # Heads that share keys become query positions.
        grouped = queries.reshape(self._num, keys.shape[1], -1, queries.shape[-1])
        sinks = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
        return _attention(grouped, keys, values, mask, scale_of(block), sinks).reshape(self._num, -1)

    def _new_places(self, form: Keys) -> tuple[Tensor, Tensor]:
        """Return the rows that get the new keys and values, and the mask [n, 1, 1, positions] of all that are kept.

        A window shows all that its layer keeps, so only what has not been written is hidden.
        """
        columns, longest = form.columns(self._caches.capacity), form.columns(self._longest)
        own = self._positions if form.window is None else self._positions % form.window
        first = torch.arange(self._num * form.heads).view(self._num, form.heads) * columns
        hidden = self._positions.unsqueeze(1) < self._caches.range[:longest]
        mask = torch.zeros(hidden.shape, dtype=self._caches.dtype).masked_fill_(hidden, NEVER)
        return (first + own.unsqueeze(1)).view(-1), mask[:, None, None]

    def recall(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the states of the running requests."""
        state, inputs = (each[: self._num] for each in self._caches.kept(index))
        return state, inputs

    def keep(self, index: int, state: Tensor, inputs: Tensor) -> None:
        """Store the states behind the tokens."""
        for kept, new in zip(self._caches.kept(index), (state, inputs), strict=True):
            kept[: self._num] = new
