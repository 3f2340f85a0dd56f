"""What the page shows of a group's samples and of a sample's tokens. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from actors.observer.sample_index import IndexedGroup, outcome_of
from messages import Segment
from runtime.data.dumps import DumpedSample
from runtime.data.trained_tokens import TrainedSample

MAX_SAMPLES: Final = 256  # of one group in one answer
MAX_TEXT_CHARS: Final = 400_000  # of all texts of a group together
MIN_TEXT_CHARS: Final = 500  # of each text
MAX_TOKENS: Final = 4_000  # in one answer
CONTEXT_TOKENS: Final = 8  # before a token, to decode it
UNFINISHED_TOKENS: Final = 6  # that together may be one character

Decode = Callable[[Sequence[int]], str]  # text of some tokens in a row


def group_shown(
    group: IndexedGroup, samples: Sequence[DumpedSample], max_chars: int = MAX_TEXT_CHARS
) -> dict[str, Any]:
    """Return what a page shows of a group: the worst sample, the best one, then the others from the best down.

    Args:
        group: the group.
        samples: its samples, in the order of the file.
        max_chars: of all its texts together.
    """
    first = samples[0]
    outcome, reason = outcome_of(first)
    bound = max(MIN_TEXT_CHARS, max_chars // (len(samples) + 1))
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


def extremes(rewards: Sequence[float | None]) -> list[int]:
    """Return the places of the best and of the worst sample of a group; of one alone if all have the same reward."""
    worst_and_best = worst_and_best_first(rewards)[:2]
    has_both = len(worst_and_best) == 2 and rewards[worst_and_best[1]] not in (None, rewards[worst_and_best[0]])
    return worst_and_best[::-1] if has_both else worst_and_best[:1]


def tokens_shown(
    segments: Sequence[Segment],
    decode: Decode | None,
    begin: int,
    trained: TrainedSample | None = None,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """Return tokens of a sample from one on, as columns of equal length.

    Args:
        segments: of the sample.
        decode: text of tokens; None: unknown, so that only ids are shown.
        begin: token of the sample, prompt included, at which they begin.
        trained: what the trainer made of the sample; None: not in the dumps.
        max_tokens: bound of the answer.
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
    end = min(begin + max_tokens, len(ids))
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
