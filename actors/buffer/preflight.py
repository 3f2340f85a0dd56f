"""Pre-start checks of the tokenizer and of data sources: render and tokenize every row."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from actors.buffer.prompts.drawn import prompt_of
from actors.buffer.prompts.generated import GeneratedPrompts
from actors.buffer.prompts.prompts import Reader
from actors.buffer.prompts.source import eval_reader, read_in_parts, training_reader
from actors.buffer.prompts.source_process import (
    START_TIMEOUT_S,
    SourceProcess,
    SourceSettings,
    drawn_twice,
    source_settings,
)
from actors.buffer.prompts.tokenizing import Tokenizing, load_tokenizing
from messages import Prompt
from runtime.data.chat_template import RENDERING_BYTES, TooMuch
from runtime.data.data_files import DataError
from runtime.functions.load import PluginError
from runtime.models.directory import LOADING_BYTES
from runtime.node.checks.context import MODEL, CheckContext, RowsCheck, SourceRows
from runtime.settings.derived import eval_data, eval_sampling, policy_model, rollout_sampling, trains_demonstrations
from runtime.settings.reading.config import Problem
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.topology import Topology
from runtime.util.formatting import show
from runtime.util.memory import MemoryLimit

PROBE: Final = "1 + 1 = ?"
MAX_OTHERS: Final = 7  # further rows that are graded if a grader fails on the first
PROBE_S: Final = 10.0  # to render or tokenise it, which takes milliseconds


class Source(NamedTuple):
    """A data source or an evaluation set."""

    key: str  # of its settings table, such as "data.0"
    data: DataConfig
    reader: Reader
    max_response_len: int  # tokens

    @property
    def place(self) -> str:
        """The file, function or class that supplies its rows."""
        return self.data.path or self.data.source or self.data.source_class or ""

    @property
    def place_key(self) -> str:
        """The settings key that names the file, function or class."""
        names = {"path": self.data.path, "source": self.data.source, "source_class": self.data.source_class}
        return f"{self.key}.{next((name for name, value in names.items() if value is not None), 'path')}"

    @property
    def rows(self) -> SourceRows:
        """Its description, before a row is read."""
        return SourceRows(self.key, self.place_key, self.place, self.max_response_len)


class SourceSummary(msgspec.Struct):
    """Summary of all rows of a source."""

    rows: SourceRows
    reader: Reader
    num_usable: int = 0
    next_other: int = 1  # number of the usable prompt that is the next of the further ones
    highest: int = -1  # highest token id
    too_long: str | None = None  # the limit that the shortest overlong prompt exceeds
    shortest: int = 0  # tokens of that prompt
    problem: Problem | None = None  # with the first row that its grader cannot grade

    def add(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Add prompts to the summary and return the usable ones."""
        rows, usable = self.rows, list[Prompt]()
        for prompt in prompts:
            reason, length = self.reader.too_long(prompt), len(prompt.prompt_ids)
            if reason is None:
                usable.append(prompt)
                rows.longest = max(rows.longest, length)
                ids = [prompt.prompt_ids] if prompt.response_ids is None else [prompt.prompt_ids, prompt.response_ids]
                self.highest = max([self.highest, *(int(part.max()) for part in ids if len(part))])
            elif self.too_long is None or length < self.shortest:
                self.too_long, self.shortest = reason, length
        rows.first = rows.first or next(iter(usable), None)
        for number, prompt in enumerate(usable, self.num_usable):
            if number >= self.next_other and rows.first is not None and prompt.rm_type == rows.first.rm_type:
                rows.others = [*rows.others, prompt][-MAX_OTHERS:]
                self.next_other = number + number // 2 + 1  # odd and even ones: sources may take turns
        self.num_usable += len(usable)
        return usable


def check_rows(context: CheckContext, grades: RowsCheck, found: list[SourceRows]) -> Iterator[Problem]:
    """Check the tokenizer, and render and tokenize every row of every source.

    Args:
        context: of the pre-start checks; receives activities and notes.
        grades: asked for each part of a source's usable prompts, until it finds one that its grader cannot grade.
        found: receives every source that could be read.
    """
    topology, model = context.topology, context.topology.model
    probe_s = min(PROBE_S, topology.run.check_timeout_s)
    context.doing(
        MODEL, model.hf_checkpoint, f"loading its tokenizer, with at most {LOADING_BYTES >> 20} MiB of memory,"
    )
    try:
        tokenizing = load_tokenizing(model.hf_checkpoint, trust_remote_code=model.trust_remote_code)
    except DataError as error:
        yield Problem.of(MODEL, model.hf_checkpoint, str(error))
        return
    if any(source.data.apply_chat_template for source in _sources(topology, tokenizing)):
        context.doing(MODEL, model.hf_checkpoint, "rendering a message with its chat template", limit_s=probe_s)
        try:
            tokenizing.render([{"role": "user", "content": PROBE}])
        except TooMuch as error:
            yield Problem.of(MODEL, model.hf_checkpoint, str(error))
            return
        except ValueError:
            pass  # the rows show whether it refuses their messages
    context.doing(MODEL, model.hf_checkpoint, "tokenising a short text with its tokenizer", limit_s=probe_s)
    try:
        with MemoryLimit(RENDERING_BYTES):
            tokenizing.encode([PROBE])
    except ValueError:
        pass  # as above
    settings = source_settings(topology)
    for source in _sources(topology, tokenizing):
        if context.has(source.place_key):
            continue
        summary = SourceSummary(source.rows, source.reader)
        try:
            for prompts in _parts(source, context, settings):
                usable = summary.add(prompts)
                if summary.problem is None and not trains_demonstrations(topology):
                    summary.problem = grades(summary.rows, usable, topology.reward)
        except (DataError, PluginError) as error:
            yield Problem.of(source.place_key, source.place, str(error).removeprefix(f"{source.place}: "))
            continue
        found.append(summary.rows)
        if (note := source.reader.take_note()) is not None:
            context.notes.append(f"{source.place_key} = {show(source.place)}: {note}")
        if summary.problem is not None:
            yield summary.problem
        if summary.rows.first is None:
            message = f"no row is short enough; in the shortest one {summary.too_long}"
            yield Problem.of(source.place_key, source.place, message)
        vocab_size = policy_model(context.topology).shape.vocab_size
        if summary.highest >= vocab_size:
            message = f"its tokenizer encodes {source.place} with token {summary.highest}, but its vocabulary has "
            yield Problem.of(MODEL, model.hf_checkpoint, f"{message}{vocab_size}")


def _parts(source: Source, context: CheckContext, settings: SourceSettings | None) -> Iterator[list[Prompt]]:
    """Yield a source's prompts in parts; of a function or a class, the first prompts."""
    doing = context.doing
    is_user_code = source.data.source_class is not None or source.data.source is not None
    if is_user_code and settings is not None:
        if settings.is_function:
            doing(source.place_key, source.place, "calling it for its first rows")
            with SourceProcess(settings) as process:
                yield list(GeneratedPrompts(process, source.data, source.reader).first)
            return
        limit_s = START_TIMEOUT_S + settings.timeout_s

        def drawing(first: int) -> None:
            doing(source.place_key, source.place, f"drawing rows from {first} on", limit_s=limit_s)

        tried = drawn_twice(settings, doing=drawing)
        context.notes.append(f"{source.place_key} = {show(source.place)}: {tried.note}")
        yield [prompt_of(number, row, source.data, source.reader) for number, row in enumerate(tried.rows)]
        return
    number, parts = 0, read_in_parts(source.data, source.reader)
    while True:
        doing(source.place_key, source.place, f"rendering and tokenising its rows from {number:,} on")
        prompts = next(parts, None)
        if prompts is None:
            return
        number += len(prompts)
        yield prompts


def _sources(topology: Topology, tokenizing: Tokenizing) -> Iterator[Source]:
    for index, data in enumerate(topology.data):
        response = rollout_sampling(topology).max_response_len
        yield Source(f"data.{index}", data, training_reader(topology, tokenizing), response)
    reader = eval_reader(topology, tokenizing)
    for index, item in enumerate(topology.eval):
        response = eval_sampling(topology, item).max_response_len
        yield Source(f"eval.{index}", eval_data(topology, item), reader, response)
