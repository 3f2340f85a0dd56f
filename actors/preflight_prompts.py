"""Pre-start checks of data sources: render and tokenize every row, and grade one row of each source."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

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
from actors.reward.grader_check import SampleRow, check_graders
from actors.reward.graders.builtin import INSTRUCTIONS, find_grader
from actors.reward.graders.calling import grade_of
from actors.reward.graders.instructions.package import add_data
from actors.reward.samples import GradedSample
from actors.rollout.sglang.facts import KEPT_OF_INPUT
from actors.trainer.models.config import HfConfig
from messages import Prompt
from runtime.data.data_files import DataError
from runtime.node.checks.apart import Doing
from runtime.settings.derived import eval_data, eval_sampling, rollout_sampling, trains_demonstrations
from runtime.settings.plugins import PluginError, is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.rules.graders import REMOTE_RM, unmet_need
from runtime.settings.tables.prompts import DataConfig
from runtime.settings.tables.reward import RewardConfig
from runtime.settings.topology import Topology, answers_are_recorded
from runtime.util.formatting import show

MODEL = "model.hf_checkpoint"


class CheckOutput(NamedTuple):
    """Outputs of a check: its current activity and its notes."""

    doing: Doing
    notes: list[str]  # the check appends to them


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


class SourceSummary(msgspec.Struct):
    """Summary of all rows of a source."""

    first: Prompt | None = None  # the first usable prompt
    highest: int = -1  # highest token id
    longest: int = 0  # tokens of the longest usable prompt
    too_long: str | None = None  # the limit that the shortest overlong prompt exceeds
    shortest: int = 0  # tokens of that prompt
    problem: Problem | None = None  # with the first row that its grader cannot grade

    def add(self, prompts: Sequence[Prompt], source: Source) -> list[Prompt]:
        """Add prompts to the summary and return the usable ones."""
        usable: list[Prompt] = []
        for prompt in prompts:
            reason, length = source.reader.too_long(prompt), len(prompt.prompt_ids)
            if reason is None:
                usable.append(prompt)
                self.longest = max(self.longest, length)
                ids = [prompt.prompt_ids] if prompt.response_ids is None else [prompt.prompt_ids, prompt.response_ids]
                self.highest = max([self.highest, *(int(part.max()) for part in ids if len(part))])
            elif self.too_long is None or length < self.shortest:
                self.too_long, self.shortest = reason, length
        self.first = self.first or next(iter(usable), None)
        return usable


def context_of(shape: HfConfig) -> int:
    """Maximum number of tokens of a prompt and its response together."""
    return shape.max_position_embeddings - KEPT_OF_INPUT


def end_of(shape: HfConfig) -> str:
    """Describe the model's context limit, as the end of an error message."""
    return f"the model's context has {shape.max_position_embeddings} tokens, of which engines reserve {KEPT_OF_INPUT}"


def prompt_problems(topology: Topology, shape: HfConfig, broken: set[str], output: CheckOutput) -> Iterator[Problem]:
    """Check data, tokenizer and graders. A grader that raises on its row adds a note, not a problem.

    Args:
        topology: the topology.
        shape: the model's configuration.
        broken: keys that already have a problem.
        output: receives activities and notes.
    """
    model = topology.model
    output.doing(MODEL, model.hf_checkpoint, "loading its tokenizer")
    try:
        tokenizing = load_tokenizing(model.hf_checkpoint, trust_remote_code=model.trust_remote_code)
    except DataError as error:
        yield Problem.of(MODEL, model.hf_checkpoint, str(error))
        return
    graded: dict[str, SampleRow] = {}
    reward = topology.reward
    known = {*reward.graders, *reward.external, *reward.judges, *reward.sums}
    settings = source_settings(topology)
    for source in _sources(topology, tokenizing):
        if source.place_key in broken:
            continue
        found = SourceSummary()
        try:
            for prompts in _parts(source, output, settings):
                usable = found.add(prompts, source)
                if found.problem is None and not trains_demonstrations(topology):
                    found.problem = _ungraded(source, usable, known, topology.reward)
        except (DataError, PluginError) as error:
            yield Problem.of(source.place_key, source.place, str(error).removeprefix(f"{source.place}: "))
            continue
        if found.problem is not None:
            yield found.problem
        if found.first is None:
            message = f"no row is short enough; in the shortest one {found.too_long}"
            yield Problem.of(source.place_key, source.place, message)
        elif f"{source.key}.rm_type" not in broken:
            graded[source.key] = SampleRow(
                found.first, group=topology.reward.group_rm and source.key.startswith("data")
            )
        yield from _too_large(topology, shape, source, found)
    if graded and not answers_are_recorded(topology) and not any(key.startswith("reward.") for key in broken):
        yield from check_graders(topology, graded, output.doing, output.notes)


def _parts(source: Source, output: CheckOutput, settings: SourceSettings | None) -> Iterator[list[Prompt]]:
    """Yield a source's prompts in parts; of a function or a class, the first prompts."""
    doing = output.doing
    is_user_code = source.data.source_class is not None or source.data.source is not None
    if is_user_code and settings is not None:
        if settings.hello.is_function:
            doing(source.place_key, source.place, "calling it for its first rows")
            with SourceProcess(settings) as process:
                yield list(GeneratedPrompts(process, source.data, source.reader).first)
            return
        limit_s = START_TIMEOUT_S + settings.timeout_s

        def drawing(first: int) -> None:
            doing(source.place_key, source.place, f"drawing rows from {first} on", limit_s=limit_s)

        tried = drawn_twice(settings, doing=drawing)
        output.notes.append(f"{source.place_key} = {show(source.place)}: {tried.note}")
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


def _ungraded(
    source: Source, prompts: Sequence[Prompt], known: Collection[str], reward: RewardConfig
) -> Problem | None:
    """Problem of the first prompt whose built-in grader does not exist, or cannot compare with its label.

    Also of one whose built-in grader returns a dict without the reward that `reward.reward_key` names.
    """
    for prompt in prompts:
        for name in reward.sums.get(prompt.rm_type or "", (prompt.rm_type,)):
            if name is None or name in known or is_plugin(name):
                continue
            if (problem := _problem_of_label(source, prompt, name, reward)) is not None:
                return problem
    return None


def _problem_of_label(source: Source, prompt: Prompt, name: str, reward: RewardConfig) -> Problem | None:
    """Problem of one prompt with one built-in grader."""
    try:
        grader = find_grader(name)
    except ValueError as error:
        return Problem.of(source.place_key, source.place, f"row {prompt.row}: {error}")
    if (need := unmet_need(name, reward)) is not None:
        return Problem.of(source.place_key, source.place, f"row {prompt.row}: the grader {name} {need}")
    if name == REMOTE_RM:
        return None
    if name in INSTRUCTIONS and reward.nltk_data is not None:
        add_data(reward.nltk_data)
    try:
        answer = grader(GradedSample(prompt=prompt.text, label=prompt.label, metadata=prompt.metadata))
    except ValueError as error:
        if name in INSTRUCTIONS:
            return Problem(key=f"{source.key}.metadata_key", message=f"row {prompt.row} of {source.place}: {error}")
        if prompt.label is None:
            wrong = f"has no label to compare with, which the grader {name} needs"
        else:
            wrong = f"has a label that the grader {name} cannot compare with: {error}"
        message = f"row {prompt.row} of {source.place} {wrong}"
        return Problem(key=f"{source.key}.label_key", message=message)
    if (error := grade_of(answer, reward.reward_key).error) is not None:
        return Problem.of("reward.reward_key", reward.reward_key, f"the grader {name} of {source.place} {error}")
    return None


def _sources(topology: Topology, tokenizing: Tokenizing) -> Iterator[Source]:
    for index, data in enumerate(topology.data):
        response = rollout_sampling(topology).max_response_len
        yield Source(f"data.{index}", data, training_reader(topology, tokenizing), response)
    reader = eval_reader(topology, tokenizing)
    for index, item in enumerate(topology.eval):
        response = eval_sampling(topology, item).max_response_len
        yield Source(f"eval.{index}", eval_data(topology, item), reader, response)


def _too_large(topology: Topology, shape: HfConfig, source: Source, found: SourceSummary) -> Iterator[Problem]:
    """Check token ids against the vocabulary, and the longest prompt plus response against context limits."""
    place, response = source.place, source.max_response_len
    if found.highest >= shape.vocab_size:
        message = f"its tokenizer encodes {place} with token {found.highest}, but its vocabulary has {shape.vocab_size}"
        yield Problem.of(MODEL, topology.model.hf_checkpoint, message)
    needed = min(found.longest + response, topology.rollout.max_context_len or found.longest + response)
    why = f"a prompt of {found.longest} tokens in {place} and a response of {response} tokens need {needed}"
    for name, engine in topology.engines.items() if not answers_are_recorded(topology) else ():
        room = engine.max_total_tokens
        if room is not None and room < needed + KEPT_OF_INPUT:
            message = f"is too small: {why}, and engines reserve {KEPT_OF_INPUT}"
            yield Problem.of(f"engines.{name}.max_total_tokens", room, message)
    if not answers_are_recorded(topology) and needed > context_of(shape):
        of_run = source.key.startswith("data")
        length = "rollout.max_response_len" if of_run else f"{source.key}.max_response_len"
        remedy = "set rollout.max_context_len to cut responses, or rollout.max_prompt_len to leave long prompts out"
        yield Problem.of(length, response, f"{why}, and {end_of(shape)}; {remedy}")
