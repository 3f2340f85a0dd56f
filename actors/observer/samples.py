"""What the page shows of samples: groups of the run's dumps, the samples of one, and the tokens of a sample."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import anyio
import msgspec
from aiohttp import web
from anyio import to_thread
from tokenizers import Tokenizer

from messages import Segment
from runtime.data.dump_files import TOKENIZER, DumpError
from runtime.data.dumps import DumpedSample
from runtime.data.sample_index import SORTS, Found, IndexedGroup, SampleIndex, Sort, outcome_of
from runtime.data.trained_tokens import TrainedSample

READ_S: Final = 1.0  # of new dump files, before a page gets what is known so far
SEARCH_S: Final = 1.0  # of a search, before the page has to ask for the rest
WAIT_S: Final = 30.0  # for the requests before this one
MAX_LISTED: Final = 50  # groups in one answer
LISTED_CHARS: Final = 160  # of the prompt and the label of each
LISTED_SAMPLES: Final = 64  # rewards of each
MAX_SAMPLES: Final = 256  # of one group in one answer
MAX_TEXT_CHARS: Final = 400_000  # of all texts of a group together
MIN_TEXT_CHARS: Final = 500  # of each text
MAX_TOKENS: Final = 4_000  # in one answer
CONTEXT_TOKENS: Final = 8  # before a token, to decode it
UNFINISHED_TOKENS: Final = 6  # that together may be one character
MAX_QUERY_CHARS: Final = 1_000
SHOWN_PROBLEMS: Final = 10
_NUMBER: Final = re.compile(r"[0-9]{1,15}")

Decode = Callable[[Sequence[int]], str]


class BadQuery(ValueError):
    """A request has a parameter that is not allowed; the text says which."""


class NotFound(LookupError):
    """There is no such group or sample in the dumps."""


class Respond(Protocol):
    """Makes the response of a page, with its headers."""

    def __call__(self, status: int, content: bytes, content_type: str) -> web.Response: ...


class Samples:
    """Reads what the page shows of samples. One request after the other.

    Args:
        directory: `run.dump_details` of the run; None: it has no dumps.
    """

    def __init__(self, directory: Path | None) -> None:
        self.index = None if directory is None else SampleIndex(directory)
        self._turn = anyio.Lock()
        self._decode: Decode | None = None
        self._has_tokenizer: bool | None = None  # None: not opened yet

    async def listed(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return some groups: search, sort, order, step, offset, limit.

        Raises:
            BadQuery: a parameter is not allowed.
        """
        return await self._read(self._listed, query)

    async def group(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the samples of one group: group, step.

        Raises:
            BadQuery: a parameter is not allowed.
            NotFound: the dumps have no such group.
            DumpError: it cannot be read.
        """
        return await self._read(self._group, query)

    async def tokens(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return tokens of one sample: group, step, place, from.

        Raises:
            BadQuery: a parameter is not allowed.
            NotFound: the dumps have no such sample.
            DumpError: it cannot be read.
        """
        return await self._read(self._tokens, query)

    async def _read(
        self, read: Callable[[SampleIndex, Mapping[str, str]], dict[str, Any]], query: Mapping[str, str]
    ) -> dict[str, Any]:
        if self.index is None:
            raise NotFound("The run writes no dumps: run.dump_details = DIRECTORY turns them on.")
        with anyio.fail_after(WAIT_S):
            await self._turn.acquire()
        try:
            return await to_thread.run_sync(read, self.index, query, abandon_on_cancel=True)
        finally:
            self._turn.release()

    def _listed(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
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
            "directory": str(index.directory),
            "problem": problem,
            "problems": list(index.problems.values())[:SHOWN_PROBLEMS],
            "num_problems": len(index.problems),
            "num_groups": found.total,
            "num_unread": index.num_unread,
            "num_left_out": index.num_left_out,
            "next": found.next,
            "groups": [self._listed_group(index, group) for group in found.groups],
        }

    def _listed_group(self, index: SampleIndex, group: IndexedGroup) -> dict[str, Any]:
        try:
            first = index.samples(group)[0]
            prompt, label = first.prompt, spelled_label(first.label)
        except DumpError as error:
            prompt, label = f"({error})", ""
        return {
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
        if group is None:
            index.advance(READ_S)
            group = index.group(number, step)
        if group is None:
            where = "" if step is None else f" in the files of step {step}"
            more = f"; {index.num_unread} steps are not read yet, so ask again" if index.num_unread else ""
            raise NotFound(f"The dumps have no group {number}{where}{more}.")
        return group

    def _group(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
        group = self._found(index, query)
        return group_shown(group, index.samples(group))

    def _tokens(self, index: SampleIndex, query: Mapping[str, str]) -> dict[str, Any]:
        group, place, begin = self._found(index, query), _number(query, "place"), _number(query, "from", 0)
        if place >= len(group.rewards):
            raise NotFound(f"Group {group.group_id} has no sample at place {place}.")
        sample = index.samples(group)[place]
        segments = index.tokens(group, place, sample)
        return tokens_shown(segments, self.decoder(), begin, index.trained(sample, segments))

    def decoder(self) -> Decode | None:
        """Return what makes text of tokens; None if the dumps have no such file."""
        if self._has_tokenizer is None and self.index is not None:
            path = self.index.directory / TOKENIZER / "tokenizer.json"
            self._has_tokenizer = path.is_file()
            if self._has_tokenizer:
                self._decode = _decoder_of(path)
        return self._decode


def _decoder_of(path: Path) -> Decode | None:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the package raises plain Exception for a file that it cannot read
        return None

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode


def group_shown(group: IndexedGroup, samples: Sequence[DumpedSample]) -> dict[str, Any]:
    """Return what a page shows of a group: the worst sample, the best one, then the others from the best down.

    Args:
        group: the group.
        samples: its samples, in the order of the file.
    """
    first = samples[0]
    outcome, reason = outcome_of(first)
    bound = max(MIN_TEXT_CHARS, MAX_TEXT_CHARS // (len(samples) + 1))
    order = worst_and_best_first([sample.reward for sample in samples])
    return {
        "step": group.step,
        "group": group.group_id,
        "attempt": group.attempt,
        "data": first.data,
        "round": first.round,
        "outcome": outcome,
        "reason": reason,
        "prompt": _cut(first.prompt, bound),
        "label": _cut(spelled_label(first.label), bound),
        "metadata": _cut(_spelled(first.metadata), bound),
        "rollout_time_s": first.rollout_time_s,
        "reward_time_s": first.reward_time_s,
        "baseline_reward": first.baseline_reward,
        "num_samples": len(samples),
        "samples": [_sample_shown(place, samples[place], bound) for place in order[:MAX_SAMPLES]],
    }


def _sample_shown(place: int, sample: DumpedSample, bound: int) -> dict[str, Any]:
    return {
        "place": place,
        "index": sample.index,
        "part": sample.part,
        "status": sample.status,
        "reason": sample.reason or "",
        "reward": sample.reward,
        "rewards": sample.rewards,
        "score": "" if sample.score is None else _cut(_spelled(sample.score), bound),
        "metadata": _cut(_spelled(sample.sample_metadata), bound) if sample.sample_metadata else "",
        "response": _cut(sample.response, bound),
        "num_segments": max(1, len(sample.segment_texts)),
        "prompt_len": sample.prompt_len,
        "response_len": sample.response_len,
        "versions": None if sample.first_version is None else (sample.first_version, sample.last_version),
    }


def worst_and_best_first(rewards: Sequence[float | None]) -> list[int]:
    """Return the order in which a group's samples are shown: worst, best, then from the best down; no reward last."""
    known = sorted(
        ((reward, place) for place, reward in enumerate(rewards) if reward is not None),
        key=lambda item: (-item[0], item[1]),
    )
    places = [place for _, place in known]
    others = [place for place, reward in enumerate(rewards) if reward is None]
    return [*places[-1:], *places[:-1], *others]


def tokens_shown(
    segments: Sequence[Segment], decode: Decode | None, begin: int, trained: TrainedSample | None = None
) -> dict[str, Any]:
    """Return tokens of a sample from one on, as columns of equal length.

    Args:
        segments: of the sample.
        decode: text of tokens; None: unknown, so that only ids are shown.
        begin: token of the sample, prompt included, at which they begin.
        trained: what the trainer made of the sample; None: not in the dumps.
    """
    ids: list[int] = []
    log_probs: list[float | None] = []  # None: the engine did not sample it
    mask: list[int] = []
    versions: list[int | None] = []
    for segment in segments:
        num_input = len(segment.prompt_ids)
        ids += segment.prompt_ids.tolist() + segment.response_ids.tolist()
        log_probs += [None] * num_input + segment.rollout_log_probs.tolist()
        mask += [0] * num_input + segment.loss_mask.tolist()
        own: list[int | None] = [None] * (num_input + len(segment.response_ids))
        for span in segment.weight_spans:
            own[num_input + span.start : num_input + span.end] = [span.version] * (span.end - span.start)
        versions += own
    inputs = [is_input for segment in segments for is_input in _inputs_of(segment)]
    end = min(begin + MAX_TOKENS, len(ids))
    return {
        "total": len(ids),
        "from": begin,
        "ids": ids[begin:end],
        "texts": None if decode is None else token_texts(ids, decode, begin, end),
        "log_probs": log_probs[begin:end],
        "mask": mask[begin:end],
        "versions": versions[begin:end],
        "inputs": inputs[begin:end],
        "is_trained": trained is not None,
        "left_out": "" if trained is None else trained.left_out,
        "rule_names": () if trained is None else trained.rule_names,
        "trainer_log_probs": [] if trained is None else trained.trainer_log_probs[begin:end].tolist(),
        "rules": [] if trained is None else trained.rules[begin:end].tolist(),
        "staleness": [] if trained is None else trained.staleness[begin:end].tolist(),
    }


def _inputs_of(segment: Segment) -> list[int]:
    return [1] * len(segment.prompt_ids) + [0] * len(segment.response_ids)


def token_texts(ids: Sequence[int], decode: Decode, begin: int, end: int) -> list[str]:
    """Return the text of each of some tokens. The last token of a character has all of it.

    Args:
        ids: tokens of the sample.
        decode: text of some tokens in a row.
        begin: first token wanted.
        end: end of the tokens wanted.
    """
    texts: list[str] = []
    start = read = max(0, begin - CONTEXT_TOKENS)
    for place in range(read, end):
        before, after = decode(ids[start:read]), decode(ids[start : place + 1])
        unfinished = after.endswith("\ufffd") and place + 1 < end and place - read < UNFINISHED_TOKENS
        text = "" if unfinished else after[len(before) :]
        if not unfinished:
            start, read = max(start, read - CONTEXT_TOKENS), place + 1
        if place >= begin:
            texts.append(text)
    return texts


def spelled_label(label: Any) -> str:
    """Return a label as text."""
    return label if isinstance(label, str) else "" if label is None else _spelled(label)


def _spelled(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def _cut(text: str, bound: int) -> str:
    return text if len(text) <= bound else f"{text[:bound]} ... ({len(text) - bound:,} more characters)"


def _number(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = query.get(name)
    if value is None and default is not None:
        return default
    if value is None or not _NUMBER.fullmatch(value):
        raise BadQuery(f"{name}: {'is missing' if value is None else 'is no number'}; allowed: a number from 0 up")
    return int(value)


def _choice(query: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    value = query.get(name, allowed[0])
    if value not in allowed:
        raise BadQuery(f"{name}: is not known; allowed: {', '.join(allowed)}")
    return value


def add_routes(application: web.Application, samples: Samples, respond: Respond) -> None:
    """Serve what the view of samples asks for."""

    def route(path: str, read: Callable[[Mapping[str, str]], Any]) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                status, shown = 200, await read(request.query)
            except BadQuery as error:
                status, shown = 400, {"problem": str(error)}
            except NotFound as error:
                status, shown = 404, {"problem": str(error)}
            except DumpError as error:
                status, shown = 409, {"problem": str(error)}
            except TimeoutError:
                status, shown = 503, {"problem": f"The requests before this one took {WAIT_S:g} s: ask again."}
            return respond(status, msgspec.json.encode(shown), "application/json")

        application.router.add_get(path, handle)

    route("/samples", samples.listed)
    route("/samples/group", samples.group)
    route("/samples/tokens", samples.tokens)
