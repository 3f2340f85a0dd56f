"""What the page shows of samples: groups, the samples of one, and the tokens of a sample."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, cast

import anyio
import msgspec
from aiohttp import web
from anyio import to_thread

from actors.observer.sample_index import SORTS, Found, IndexedGroup, SampleIndex, Sort
from actors.observer.shown_samples import (
    MAX_TOKENS,
    Decode,
    extremes,
    group_shown,
    spelled_label,
    tokens_shown,
    worst_and_best_first,
)
from runtime.data.columns import DumpError
from runtime.data.dump_files import TOKENIZER
from runtime.data.dumps import DumpedSample
from runtime.models.directory import ModelError, open_tokenizer
from runtime.util.formatting import count_of

READ_S: Final = 1.0  # of new dump files, before a page gets what is known so far
SEARCH_S: Final = 1.0  # of a search, before the page has to ask for the rest
WAIT_S: Final = 30.0  # for the requests before this one
MAX_LISTED: Final = 50  # groups in one answer
LISTED_CHARS: Final = 160  # of the prompt, the label and two responses of each
LISTED_SAMPLES: Final = 64  # rewards of each
MAX_QUERY_CHARS: Final = 1_000
REPORT_STEPS: Final = 20  # newest ones, of which a report has some groups
REPORT_GROUPS: Final = 8  # with the lowest mean reward, with the highest, and with the largest spread
REPORT_BYTES: Final = 2_000_000  # of all of them
REPORT_CHARS: Final = 40_000  # of the texts of each
REPORT_TOKENS: Final = 1_000  # of the worst sample of each, and of the best one
NO_DUMPS: Final = (
    "The run keeps no samples: observe.samples = true keeps those of the newest steps, run.dump_details = DIRECTORY "
    "those of all."
)
NO_TRAINED: Final = (
    "The dumps have nothing of the trainer about this sample: run.dump_details with observe.tokens = true adds it, "
    "once the sample's step is trained."
)
SHOWN_PROBLEMS: Final = 10
MAX_DIGITS: Final = 15  # of a number in a query
_NUMBER: Final = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}")


class BadQuery(ValueError):
    """A request has a parameter that is not allowed; the text says which."""


class NotFound(LookupError):
    """There is no such group or sample in the dumps; with `again`, in those that were read so far."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


Read = Callable[[SampleIndex, Mapping[str, str]], dict[str, Any]]


class Respond(Protocol):
    """Makes the response of a page, with its headers."""

    def __call__(self, status: int, content: bytes, content_type: str) -> web.Response: ...


class Samples:
    """Reads what the page shows of samples. One request after the other.

    Args:
        directory: of the run's dumps; None: it has no dumps.
    """

    def __init__(self, directory: Path | None) -> None:
        self.index = None if directory is None else SampleIndex(directory)
        self._turn = anyio.Lock()

    async def answer(self, read: Read, query: Mapping[str, str]) -> dict[str, Any]:
        """Return what a method of this class reads: `listed`, `group` or `tokens`.

        Raises:
            BadQuery: a parameter is not allowed.
            NotFound: there is no such group or sample.
            DumpError: it cannot be read.
            TimeoutError: the requests before this one take too long.
        """
        if self.index is None:
            raise NotFound(NO_DUMPS)
        with anyio.fail_after(WAIT_S):
            await self._turn.acquire()
        try:
            return await to_thread.run_sync(read, self.index, query, abandon_on_cancel=True)
        finally:
            self._turn.release()

    @cached_property
    def _decode(self) -> Decode | None:
        """What makes text of tokens; None: there is no file for it, or it cannot be read."""
        return None if self.index is None else _decoder_of(self.index.directory / TOKENIZER)

    def listed(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
        """Return some groups: search, sort, order, step, offset, limit."""
        sort = _choice(query, "sort", SORTS)
        order = _choice(query, "order", ("descending", "ascending"))
        limit = min(_number(query, "limit", MAX_LISTED), MAX_LISTED)
        step = _number(query, "step") if "step" in query else None
        offset, text = _number(query, "offset", 0), query.get("search", "")
        if len(text) > MAX_QUERY_CHARS:
            raise BadQuery(f"search: has {len(text)} characters; allowed: up to {MAX_QUERY_CHARS}")
        problem, found = "", Found([], None, 0)
        try:
            index.advance(READ_S)
        except DumpError as error:
            problem = str(error)
        else:
            found = index.find(
                text,
                sort=cast("Sort", sort),
                descending=order == "descending",
                step=step,
                offset=offset,
                limit=max(1, limit),
                budget_s=SEARCH_S,
            )
        return {
            **_about(index),
            "problem": problem,
            "num_groups": found.total,
            "num_unread": index.num_unread,
            "num_left_out": index.num_left_out,
            "next": found.next,
            "groups": [self._listed_group(index, group) for group in found.groups],
        }

    def _listed_group(self, index: SampleIndex, group: IndexedGroup) -> dict[str, Any]:
        places = extremes(group.rewards)
        try:
            prompt, label, responses = index.texts(group, places)
            label = spelled_label(label)
        except DumpError as error:
            prompt, label, responses = f"({error})", "", []
        return {
            "responses": [response[:LISTED_CHARS] for response in responses],
            "step": group.step,
            "group": group.group_id,
            "attempt": group.attempt,
            "rewards": group.rewards[:LISTED_SAMPLES],
            "num_samples": len(group.rewards),
            "reward": group.mean_reward,
            "spread": group.spread,
            "length": group.mean_length,
            "longest": max(group.lengths),
            "versions": group.versions,
            "outcome": group.outcome,
            "reason": group.reason,
            "prompt": prompt[:LISTED_CHARS],
            "label": label[:LISTED_CHARS],
        }

    def _found(self, index: SampleIndex, query: Mapping[str, str]) -> IndexedGroup:
        """Return the group of a request; read more of the dumps if it is not known yet."""
        number = _number(query, "group")
        step = _number(query, "step") if "step" in query else None
        group = index.group(number, step)
        if group is None or index.lost(group):
            index.advance(READ_S)
            group = index.group(number, step)
        if group is None:
            where = "" if step is None else f" in the {index.place(step)}"
            if index.num_unread:
                left = count_of(index.num_unread, "step")
                raise NotFound(f"Group {number} is looked for{where}: {left} left to read.", again=True)
            raise NotFound(f"The dumps have no group {number}{where}.")
        return group

    def group(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the samples of one group: group, step."""
        group = self._found(index, query)
        return {**group_shown(group, index.samples(group)), "place": index.place(group.step)}

    def tokens(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
        """Return tokens of one sample: group, step, place, from."""
        group, place, begin = self._found(index, query), _number(query, "place"), _number(query, "from", 0)
        if place >= len(group.rewards):
            raise NotFound(f"Group {group.group_id} has no sample at place {place}.")
        return self._tokens_of(index, group, place, index.samples(group)[place], begin, MAX_TOKENS)

    def _tokens_of(
        self, index: SampleIndex, group: IndexedGroup, place: int, sample: DumpedSample, begin: int, max_tokens: int
    ) -> dict[str, Any]:
        """Return tokens of a sample. A bad file of the trainer costs what the trainer added, and is named."""
        segments, trained, problem = index.tokens(group, place, sample), None, ""
        try:
            trained = index.trained(sample, segments)
        except DumpError as error:
            problem = str(error)
        shown = tokens_shown(segments, self._decode, begin, trained, max_tokens)
        return {**shown, "trained_problem": problem, "untrained": NO_TRAINED}

    def report(self, max_bytes: int = REPORT_BYTES) -> dict[str, Any]:
        """Return some groups of the newest steps for a report: the worst, the best, and those of the largest spread.

        Args:
            max_bytes: of all of them.
        """
        found: dict[str, Any] = {"listed": {"problem": NO_DUMPS}, "groups": [], "tokens": {}}
        if self.index is None:
            return found
        index, num_bytes = self.index, 0
        try:
            for _ in range(REPORT_STEPS):
                index.advance(0.0)
        except DumpError as error:
            found["listed"] = {"problem": str(error)}
            return found
        groups = _chosen(index)
        listed = list[dict[str, Any]]()
        for group in groups:
            try:
                shown, tokens = self._reported(index, group)
            except DumpError:
                continue  # replaced meanwhile, or damaged: a report does without it
            num_bytes += len(msgspec.json.encode((shown, tokens)))
            if num_bytes > max_bytes:
                break
            listed.append(self._listed_group(index, group))
            found["groups"].append(shown)
            found["tokens"] |= tokens
        found["listed"] = {
            **_about(index),
            "problem": "",
            "note": f"{len(listed)} of {index.num_groups} groups of the newest {REPORT_STEPS} steps: those with the "
            "lowest and the highest mean reward, and those with the largest spread",
            "next": None,
            "groups": listed,
        }
        return found

    def _reported(self, index: SampleIndex, group: IndexedGroup) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a report has of a group: its texts, and tokens of its worst and its best sample by their key."""
        samples = index.samples(group)
        shown, tokens = group_shown(group, samples, REPORT_CHARS), dict[str, Any]()
        shown["place"] = index.place(group.step)
        for place in worst_and_best_first([sample.reward for sample in samples])[:2]:
            key = f"{group.step}/{group.group_id}/{place}"
            tokens[key] = self._tokens_of(index, group, place, samples[place], 0, REPORT_TOKENS)
        return shown, tokens


def _decoder_of(directory: Path) -> Decode | None:
    try:
        tokenizer = open_tokenizer(directory)
    except ModelError:
        return None

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode


def _about(index: SampleIndex) -> dict[str, Any]:
    """Return where the samples come from, and which steps cannot be read."""
    problems = list(index.problems.values())
    return {"source": f"in {index.directory}", "problems": problems[:SHOWN_PROBLEMS], "num_problems": len(problems)}


def _chosen(index: SampleIndex) -> list[IndexedGroup]:
    """Return the groups of a report, each once, newest step first."""
    wanted: tuple[tuple[Sort, bool], ...] = ("reward", False), ("reward", True), ("spread", True)
    found = [
        group
        for sort, descending in wanted
        for group in index.find(sort=sort, descending=descending, limit=REPORT_GROUPS, budget_s=SEARCH_S).groups
    ]
    once = {(group.step, group.group_id, group.attempt): group for group in found}
    return sorted(once.values(), key=lambda group: (-group.step, group.group_id))


def _number(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = query.get(name)
    if value is None and default is not None:
        return default
    if value is None or not _NUMBER.fullmatch(value):
        problem = "is missing" if value is None else "is not a number"
        raise BadQuery(f"{name}: {problem}; allowed: a number from 0 up, of at most {MAX_DIGITS} digits")
    return int(value)


def _choice(query: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    value = query.get(name, allowed[0])
    if value not in allowed:
        raise BadQuery(f"{name}: is not known; allowed: {', '.join(allowed)}")
    return value


def add_routes(application: web.Application, samples: Samples, respond: Respond) -> None:
    """Serve what the view of samples asks for."""

    def route(path: str, read: Read) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                status, shown = 200, await samples.answer(read, request.query)
            except BadQuery as error:
                status, shown = 400, {"problem": str(error)}
            except NotFound as error:
                status, shown = 200, {"problem": str(error), "again": error.again}  # browsers log a 404 as an error
            except DumpError as error:
                status, shown = 409, {"problem": str(error)}
            except TimeoutError:
                status, shown = 503, {"problem": f"The requests before this one took {WAIT_S:g} s: ask again."}
            return respond(status, msgspec.json.encode(shown), "application/json")

        application.router.add_get(path, handle)

    route("/samples", samples.listed)
    route("/samples/group", samples.group)
    route("/samples/tokens", samples.tokens)
