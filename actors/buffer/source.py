"""Training and evaluation prompts: read, rendered and tokenised once, and the order in which they are issued."""

import functools
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.buffer.tokenizing import Tokenizing, load_tokenizing
from messages import Prompt, PromptsLoaded
from runtime.data_files import DataError
from runtime.recipe import DataConfig, Recipe, eval_data, max_prompt_len
from runtime.rows import Row, read_rows

WORD: Final = 2**64  # seeds and epochs are taken modulo this


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt number falls: a pass over all prompts, and the position in their fixed list."""

    epoch: int
    position: int


class LoadedData(msgspec.Struct, frozen=True, kw_only=True):
    """Usable prompts of one data source, in file order."""

    name: str
    prompts: tuple[Prompt, ...]
    num_too_long: int  # rows left out, since they are over the prompt limit
    took_s: float

    @property
    def event(self) -> PromptsLoaded:
        """The same as an event."""
        return PromptsLoaded(
            data=self.name,
            num_prompts=len(self.prompts),
            num_too_long=self.num_too_long,
            took_s=self.took_s,
            fingerprint=fingerprint_of(self.prompts),
        )


def fingerprint_of(prompts: Iterable[Prompt]) -> str:
    """16 hex digits that change when anything of any prompt or their order does."""
    digest = hashlib.sha256()
    for prompt in prompts:
        rest = (prompt.data, prompt.row, prompt.text, prompt.label, prompt.metadata, prompt.rm_type)
        digest.update(msgspec.msgpack.encode(rest))
        digest.update(prompt.prompt_ids.tobytes())
    return digest.hexdigest()[:16]


class PromptSet:
    """Training prompts by number, and the evaluation sets. Number 0 is issued first; numbers go on over any epochs.

    All data sources are laid end to end in the order of the recipe; one epoch is one pass over the whole list, so
    each source is seen in proportion to its size. Nothing here changes after loading: which prompt a number means
    depends on the files, the recipe and the seed alone, so a restart finds every issued prompt again.
    """

    def __init__(
        self, sources: Sequence[LoadedData], evals: Sequence[LoadedData] = (), *, shuffle: bool = False, seed: int = 0
    ) -> None:
        """Raises ValueError if there is no training prompt at all."""
        self._prompts = tuple(prompt for source in sources for prompt in source.prompts)
        if not self._prompts:
            raise ValueError("no prompts")
        self._shuffle = shuffle
        self._seed = seed
        self.evals: Mapping[str, tuple[Prompt, ...]] = {item.name: item.prompts for item in evals}
        self.loaded = tuple(item.event for item in (*sources, *evals))

    def __len__(self) -> int:
        """Training prompts of one epoch."""
        return len(self._prompts)

    def prompt(self, number: int) -> Prompt:
        """The prompt that was or will be issued as this number, counted from 0 over all epochs."""
        return self._prompts[self.place(number).position]

    def place(self, number: int) -> Place:
        """In which epoch a number falls, and on which prompt."""
        return place_of(number, len(self._prompts), shuffle=self._shuffle, seed=self._seed)


def place_of(number: int, num_prompts: int, *, shuffle: bool, seed: int) -> Place:
    """Order of issue, as a pure function; any number of epochs may lie before `number`.

    Raises:
        ValueError: a negative number, or no prompts.
    """
    if number < 0 or num_prompts < 1:
        raise ValueError(f"there is no prompt {number} among {num_prompts}")
    epoch, offset = divmod(number, num_prompts)
    position = int(epoch_order(num_prompts, seed, epoch)[offset]) if shuffle else offset
    return Place(epoch=epoch, position=position)


@functools.lru_cache(maxsize=4)  # an epoch's end and the next one's start are asked for side by side
def epoch_order(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The shuffle of one epoch: a permutation of [0, num_prompts) that depends on the arguments alone.

    Prompts are sorted by Philox words keyed by seed and epoch. NumPy promises that bit stream for good, unlike
    what Generator.permutation makes of it.
    """
    words = np.random.Philox(key=np.array([seed % WORD, epoch % WORD], dtype=np.uint64)).random_raw(num_prompts)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


def load_prompts(recipe: Recipe) -> PromptSet:
    """Load every data source and evaluation set of a recipe. Blocks: reads files, tokenises.

    Raises:
        DataError: a file, a row or the tokenizer cannot be used.
    """
    tokenizing = load_tokenizing(recipe.model.hf_checkpoint)
    limit = max_prompt_len(recipe.rollout)
    return PromptSet(
        [load_data(data, tokenizing, limit) for data in recipe.data],
        [load_data(eval_data(recipe, item), tokenizing, limit) for item in recipe.eval],
        shuffle=recipe.rollout.shuffle,
        seed=recipe.rollout.seed,
    )


def load_data(data: DataConfig, tokenizing: Tokenizing, limit: int | None) -> LoadedData:
    """Read, render and tokenise one data source, leaving out prompts of more than `limit` tokens.

    Raises:
        DataError: a row cannot be used, or none is left.
    """
    began = time.monotonic()
    rows = list(read_rows(data))
    texts = [_render(row, data, tokenizing) for row in rows]
    all_ids = _encode(rows, texts, data, tokenizing)
    prompts = tuple(
        Prompt(
            data=data.name,
            row=row.number,
            text=text,
            prompt_ids=ids,
            label=row.label,
            metadata=row.metadata,
            rm_type=_rm_type(row, data),
        )
        for row, text, ids in zip(rows, texts, all_ids, strict=True)
        if limit is None or len(ids) <= limit
    )
    if not prompts:
        shortest = min(len(ids) for ids in all_ids)
        raise DataError(
            f"{data.path}: every prompt is over the limit of {limit} tokens (the shortest has {shortest}): "
            "raise rollout.max_prompt_len or rollout.max_context_len"
        )
    return LoadedData(
        name=data.name,
        prompts=prompts,
        num_too_long=len(rows) - len(prompts),
        took_s=time.monotonic() - began,
    )


def _render(row: Row, data: DataConfig, tokenizing: Tokenizing) -> str:
    if not data.apply_chat_template:
        return str(row.prompt)
    turns: list[dict[str, Any]] = (
        [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    )
    try:
        return tokenizing.render(turns, tools=row.metadata.get("tools"), **data.apply_chat_template_kwargs)
    except ValueError as error:
        raise DataError(f"{row.place}: {error}") from None


def _encode(rows: list[Row], texts: list[str], data: DataConfig, tokenizing: Tokenizing) -> list[Any]:
    try:
        return tokenizing.encode(texts)
    except ValueError:
        pass  # which row is it?
    for row, text in zip(rows, texts, strict=True):
        try:
            tokenizing.encode([text])
        except ValueError as error:
            message = f"{row.place}: cannot be tokenised: {error}: {text[:80]!r}"
            raise DataError(message) from None
    raise DataError(f"{data.path}: cannot be tokenised")


def _rm_type(row: Row, data: DataConfig) -> str:
    """The row's own grader, else the source's. A row may only name a built-in: data must not choose code to run."""
    own = row.metadata.get("rm_type")
    rm_type = own or data.rm_type
    if not isinstance(rm_type, str):
        raise DataError(f"{row.place}: no grader: set rm_type for {data.name}, or in the row's metadata")
    if own and ":" in rm_type:
        raise DataError(f"{row.place}: rm_type = {own!r}: a row may only name a built-in grader")
    return rm_type
