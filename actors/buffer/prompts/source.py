"""Training and evaluation prompts, read and tokenized once, and the order of issue."""

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.buffer.prompts.demonstrations import DemonstrationReader
from actors.buffer.prompts.drawn import DrawnPrompts, prompt_of
from actors.buffer.prompts.generated import GeneratedPrompts
from actors.buffer.prompts.prompts import LoadedData, PromptReader, Reader, fingerprint_with
from actors.buffer.prompts.source_process import SourceProcess, source_settings
from actors.buffer.prompts.tokenizing import Tokenizing, load_tokenizing
from messages import Prompt
from runtime.data.data_files import DataError
from runtime.data.rows import read_rows
from runtime.node.checks.apart import Doing, unlimited
from runtime.settings.derived import (
    MIX_BLOCK,
    eval_data,
    max_prompt_len,
    trains_demonstrations,
    trains_pairs,
    uses_teacher,
)
from runtime.settings.reading.config import TopologyError
from runtime.settings.recipe import Recipe
from runtime.settings.rules.validate import validate
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology

PART_ROWS: Final = 1000  # rows of a data file that are rendered and tokenized at a time
WORD: Final = 2**64  # modulus of seeds and epochs


class PromptPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a prompt number: the epoch, and the index into the fixed list of prompts."""

    epoch: int
    position: int


class PromptSet:
    """Training prompts by number, and the evaluation sets. Number 0 is issued first; numbers continue over epochs.

    The list holds all data sources in the recipe's order, and an epoch is one pass over it. Each source thus
    contributes in proportion to its size; with weights, in proportion to its weight, and has epochs of its own. The
    prompt of a number depends on the files, the recipe and the seed alone: a restart finds every issued prompt again.
    """

    def __init__(
        self,
        sources: Sequence[LoadedData],
        evals: Sequence[LoadedData] = (),
        *,
        shuffle: bool = False,
        seed: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        """Take the prompts.

        Args:
            sources: training prompts.
            evals: evaluation sets.
            shuffle: whether each epoch has an order of its own.
            seed: of the orders.
            weights: of the sources; empty: by their sizes.

        Raises:
            ValueError: there are no training prompts.
        """
        self._prompts = tuple(prompt for source in sources for prompt in source.prompts)
        if not self._prompts:
            raise ValueError("no prompts")
        self._shuffle = shuffle
        self._seed = seed
        self._sizes = [len(source.prompts) for source in sources]
        self._mixture = mixture_of(tuple(weights)) if weights else None
        self.evals: Mapping[str, tuple[Prompt, ...]] = {item.name: item.prompts for item in evals}
        events = [source.event for source in sources]
        if weights:  # a run is not resumed with others, under which its numbers would mean other prompts
            events = [
                msgspec.structs.replace(event, fingerprint=fingerprint_with(event.fingerprint, weight))
                for event, weight in zip(events, weights, strict=True)
            ]
        self.loaded = (*events, *(item.event for item in evals))

    def __len__(self) -> int:
        """Number of training prompts in one epoch."""
        return len(self._prompts)

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number, counted from 0 over all epochs."""
        return self._prompts[self.place(number).position]

    def close(self) -> None:
        """Do nothing: prompts of files have no process."""

    def place(self, number: int) -> PromptPlace:
        """The epoch of a number, of its source if they have weights, and its position in the list of prompts."""
        if self._mixture is None:
            return place_of(number, len(self._prompts), shuffle=self._shuffle, seed=self._seed)
        source, draw = self._mixture.draw(number)
        place = place_of(draw, self._sizes[source], shuffle=self._shuffle, seed=self._seed)
        return PromptPlace(epoch=place.epoch, position=sum(self._sizes[:source]) + place.position)


class Mixture(NamedTuple):
    """The order of sources in each block of MIX_BLOCK prompts."""

    sources: NDArray[np.int64]  # [MIX_BLOCK]
    earlier: NDArray[np.int64]  # [MIX_BLOCK], earlier prompts of that source in the block
    sizes: NDArray[np.int64]  # prompts of each source in a block

    def draw(self, number: int) -> tuple[int, int]:
        """Return the source of a prompt number, and how many prompts of that source come before it."""
        block, place = divmod(number, MIX_BLOCK)
        source = int(self.sources[place])
        return source, block * int(self.sizes[source]) + int(self.earlier[place])


@functools.lru_cache(maxsize=4)
def mixture_of(weights: tuple[float, ...]) -> Mixture:
    """Spread the prompts of each source evenly over a block. Pure.

    The sources' shares of a block are rounded by largest remainders; each has at least one prompt.
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    sizes = np.maximum(np.floor(exact).astype(np.int64), 1)
    for _ in range(MIX_BLOCK - int(sizes.sum())):
        sizes[int(np.argmax(exact - sizes))] += 1
    while int(sizes.sum()) > MIX_BLOCK:  # shares that were raised to one
        sizes[int(np.argmax(sizes - exact))] -= 1
    sources = np.repeat(np.arange(len(sizes)), sizes)
    earlier = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    order = np.argsort((earlier + 0.5) / sizes[sources], kind="stable")
    return Mixture(sources[order], earlier[order], sizes)


def place_of(number: int, num_prompts: int, *, shuffle: bool, seed: int) -> PromptPlace:
    """Compute the place of a prompt number in the order of issue. Pure.

    Raises:
        ValueError: `number` is negative, or there are no prompts.
    """
    if number < 0 or num_prompts < 1:
        raise ValueError(f"prompt {number} does not exist: there are {num_prompts} prompts")
    epoch, offset = divmod(number, num_prompts)
    position = int(epoch_order(num_prompts, seed, epoch)[offset]) if shuffle else offset
    return PromptPlace(epoch=epoch, position=position)


@functools.lru_cache(maxsize=4)  # calls alternate at the boundary of two epochs
def epoch_order(num_prompts: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The shuffle of one epoch: a permutation of [0, num_prompts) that depends on the arguments alone.

    Prompts are sorted by Philox words keyed by seed and epoch. NumPy guarantees that bit stream across versions,
    unlike the result of Generator.permutation.
    """
    words = np.random.Philox(key=np.array([seed % WORD, epoch % WORD], dtype=np.uint64)).random_raw(num_prompts)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


def load_prompts(recipe: Recipe) -> PromptSet | GeneratedPrompts | DrawnPrompts:
    """Load every data source and evaluation set of a recipe. Blocks: reads files, tokenizes, calls a user's function.

    Raises:
        DataError: a file, a row, a function or the tokenizer cannot be used.
    """
    tokenizing = load_tokenizing(recipe.model.hf_checkpoint, trust_remote_code=recipe.model.trust_remote_code)
    evals = _load_evals(recipe, tokenizing)
    reader = training_reader(recipe, tokenizing)
    if (settings := source_settings(recipe)) is not None:
        data, source = recipe.data[0], SourceProcess(settings)
        try:
            return (DrawnPrompts if data.source is None else GeneratedPrompts)(source, data, reader, evals)
        except BaseException:
            source.kill()
            raise
    sources = [load_data(data, reader) for data in recipe.data]
    weights = [data.weight for data in recipe.data if data.weight is not None]
    return PromptSet(sources, evals, shuffle=recipe.rollout.shuffle, seed=recipe.rollout.seed, weights=weights)


def first_prompts(recipe: Recipe, number: int) -> list[Prompt]:
    """The prompts that a run of the recipe issues first, at most this number. Blocks, as `load_prompts`.

    Raises:
        DataError: a file, a row, a function or the tokenizer cannot be used.
    """
    settings = source_settings(recipe)
    if settings is not None and not settings.is_function:
        data = recipe.data[0]
        tokenizing = load_tokenizing(recipe.model.hf_checkpoint, trust_remote_code=recipe.model.trust_remote_code)
        reader = training_reader(recipe, tokenizing)
        with SourceProcess(settings) as source:
            source.start()
            rows = source.draw(0, number).rows
        return [prompt_of(place, row, data, reader) for place, row in enumerate(rows)]
    prompts = load_prompts(recipe)
    try:
        known = len(prompts) if isinstance(prompts, PromptSet) else number  # the numbers go on in the next epoch
        return [prompts.prompt(place) for place in range(min(number, known))]
    finally:
        prompts.close()


def first_of_evaluation(topology: Topology, number: int) -> list[Prompt]:
    """The first prompts of the first evaluation set. Blocks, and raises as `first_prompts`."""
    tokenizing = load_tokenizing(topology.model.hf_checkpoint, trust_remote_code=topology.model.trust_remote_code)
    data = eval_data(topology, topology.eval[0])
    return list(load_data(data, eval_reader(topology, tokenizing)).prompts[:number])


def training_reader(recipe: Recipe, tokenizing: Tokenizing) -> Reader:
    """The reader of training rows: for prompts, or for demonstrations."""
    if trains_demonstrations(recipe):
        return DemonstrationReader(tokenizing, recipe.rollout)
    return PromptReader(tokenizing, max_prompt_len(recipe.rollout), is_graded=not uses_teacher(recipe.algorithm))


def eval_reader(recipe: Recipe, tokenizing: Tokenizing) -> Reader:
    """The reader of evaluation rows: for prompts, or for preference pairs."""
    if trains_pairs(recipe):
        return training_reader(recipe, tokenizing)
    return PromptReader(tokenizing, max_prompt_len(recipe.rollout))


def _load_evals(recipe: Recipe, tokenizing: Tokenizing) -> list[LoadedData]:
    reader = eval_reader(recipe, tokenizing)
    return [load_data(eval_data(recipe, item), reader) for item in recipe.eval]


def load_held_out(recipe: Recipe) -> Mapping[str, Sequence[Prompt]]:
    """Load the evaluation sets of preference pairs, by name. Empty: there are none. Blocks, as `load_prompts`.

    Raises:
        DataError: a file, a row or the tokenizer cannot be used.
    """
    if not recipe.eval or not trains_pairs(recipe):
        return {}
    tokenizing = load_tokenizing(recipe.model.hf_checkpoint, trust_remote_code=recipe.model.trust_remote_code)
    return {item.name: item.prompts for item in _load_evals(recipe, tokenizing)}


def read_in_parts(data: DataConfig, reader: Reader) -> Iterator[list[Prompt]]:
    """Read, render and tokenize one data source, PART_ROWS rows at a time; includes rows over a limit.

    Raises:
        DataError: a row cannot be used.
    """
    rows = read_rows(data)
    while part := list(islice(rows, PART_ROWS)):
        yield reader.read(part, data)


def load_data(data: DataConfig, reader: Reader) -> LoadedData:
    """Read, render and tokenize one data source; skip rows over a limit.

    Raises:
        DataError: a row cannot be used, or every row is over a limit.
    """
    began = time.monotonic()
    read = reader.read(list(read_rows(data)), data)
    prompts = tuple(prompt for prompt in read if reader.too_long(prompt) is None)
    if not prompts:
        shortest = min(read, key=_num_tokens)
        raise DataError(f"{data.path}: no row is short enough; in the shortest one {reader.too_long(shortest)}")
    return LoadedData(
        name=data.name,
        prompts=prompts,
        num_too_long=len(read) - len(prompts),
        took_s=time.monotonic() - began,
    )


def _num_tokens(prompt: Prompt) -> int:
    return len(prompt.prompt_ids) + (0 if prompt.response_ids is None else len(prompt.response_ids))


def count_steps(topology: Topology, doing: Doing = unlimited) -> Topology:
    """Replace train.num_epoch by train.num_steps. Blocks: reads and tokenizes the data and reports progress.

    Raises:
        DataError: the data cannot be used, or has less than a batch of prompts.
        TopologyError: the number of steps breaks a rule.
    """
    num_epoch = topology.train.num_epoch
    if num_epoch is None:
        return topology
    num_steps = num_epoch * steps_per_epoch(topology, doing)
    train = msgspec.structs.replace(topology.train, num_steps=num_steps, num_epoch=None)
    counted = msgspec.structs.replace(topology, train=train)
    if problems := validate(counted):
        raise TopologyError(problems)
    return counted


def steps_per_epoch(recipe: Recipe, doing: Doing = unlimited) -> int:
    """Count the full batches in one pass over all usable prompts; the rest goes into the next pass's first batch.

    Raises:
        DataError: the data cannot be used, or there is no full batch.
    """
    reader = training_reader(
        recipe, load_tokenizing(recipe.model.hf_checkpoint, trust_remote_code=recipe.model.trust_remote_code)
    )
    batch_size = recipe.rollout.rollout_batch_size
    num_prompts = 0
    for index, data in enumerate(recipe.data):
        doing(f"data.{index}.path", data.path, "counting its rows")
        for prompts in read_in_parts(data, reader):
            num_prompts += sum(reader.too_long(prompt) is None for prompt in prompts)
            doing(f"data.{index}.path", data.path, f"counting its rows: {num_prompts:,} so far")
    if num_prompts < batch_size:
        raise DataError(
            f"train.num_epoch: an epoch has {num_prompts} prompts, less than one batch "
            f"(rollout.rollout_batch_size = {batch_size})"
        )
    return num_prompts // batch_size
