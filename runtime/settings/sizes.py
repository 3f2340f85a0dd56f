"""Stream sizes and the largest message of a run, derived from its recipe."""

from typing import Final

import msgspec

from runtime.bus.limits import StreamLimits
from runtime.settings.derived import (
    max_prompt_len,
    over_sampling_batch_size,
    trains_demonstrations,
    trains_pairs,
)
from runtime.settings.placement import num_engines
from runtime.settings.recipe import Recipe
from runtime.settings.tables.engines import EngineConfig
from runtime.settings.topology import Topology, column_names, topk_of_column

KIB: Final = 1024
MIB: Final = 1024 * KIB
ASSUMED_PROMPT_LEN: Final = 4096  # tokens, if the recipe sets no limit
SAMPLE_BYTES: Final = 1 * KIB  # ids, names, spans and headers of one sample
RESPONSE_TOKEN_BYTES: Final = 20  # id 4, log-prob 4, mask 1, and its text
COLUMN_TOKEN_BYTES: Final = 4  # a number of a column, such as a teacher's log-prob
TOPK_TOKEN_BYTES: Final = 8  # one of the likeliest tokens that come with it: id 4, log-prob 4
PROMPT_TOKEN_BYTES: Final = 4
KEPT_TOKENS: Final = 64  # tokens that top-p and top-k keep on average of a response; one with more may need more room
TEXT_TOKEN_BYTES: Final = 10  # escaped text
DEMONSTRATED_TOKEN_BYTES: Final = 5  # id 4, mask 1: a task contains its demonstration
GROUP_EVENTS_BYTES: Final = 2 * KIB  # issued, completed, judged, batched
SAMPLE_EVENT_BYTES: Final = 512  # a sample's summary in these events
ISSUED_GROUP_BYTES: Final = 128  # its ids; less when it is closed, even with all pooled and spare groups
CITED_PART_BYTES: Final = 16
PROMPT_PART_BYTES: Final = 4 * MIB  # of a stored prompt (runtime/data/stored_prompts.py)
BATCHED_GROUP_BYTES: Final = 128  # its reference, and those of groups that the batch passes over
UNTRAINED_GROUP_BYTES: Final = 128  # a skipped group of a batch, with its reason
UNTRAINED_SAMPLE_BYTES: Final = 24  # index and part of a skipped sample
EVAL_SET_BYTES: Final = 4 * KIB  # metrics of one set, one per k of pass@k
MAX_OWN_METRICS: Final = 64  # of the function of a set
OWN_METRICS_BYTES: Final = 12 * KIB  # all of them, with the longest names
STEP_EVENTS_BYTES: Final = 16 * KIB  # batches, weights, metrics, restarts
ENGINE_EVENTS_BYTES: Final = 16 * KIB  # state changes and refusals of an engine: a burst of each kind
SLACK: Final = 2  # factor from the needed size to a derived limit
REJECTED: Final = 2  # groups generated per kept group, with a dynamic filter
SPARE_BATCHES: Final = 2  # one being generated, one being trained
MAX_MESSAGE_BYTES: Final = 64 * MIB  # the server's own limit
DEFAULT_MESSAGE_BYTES: Final = 8 * MIB
FLOORS: Final = {"event_bytes": 256 * MIB, "work_bytes": 64 * MIB, "data_bytes": 256 * MIB}


class EventSize(msgspec.Struct, frozen=True, kw_only=True):
    """Size bound of an event that grows with a setting and cannot be split."""

    events: str  # names of the bounded events
    key: str  # setting that the size grows with
    number: int  # its current value
    each_bytes: int  # bytes per unit


KEPT_FREE_BYTES: Final = 1024 * KIB  # for logs and other small files


class StreamSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run's streams and its largest message, in bytes."""

    event_bytes: int  # events of all steps in the log at once
    work_bytes: int  # all tasks and score requests that can be open
    data_bytes: int  # samples of all batches that may still be needed
    max_payload_bytes: int  # largest message


def needed_sizes(recipe: Topology) -> StreamSizes:
    """Compute the most that the recipe can need; a configured limit below this is refused."""
    rollout = recipe.rollout
    groups = over_sampling_batch_size(rollout) * (REJECTED if rollout.dynamic_filter else 1)
    open_groups = over_sampling_batch_size(rollout) + rollout.rollout_batch_size * (1 + rollout.max_staleness)
    engine_bytes = ENGINE_EVENTS_BYTES * sum(_count(engine) for engine in recipe.engines.values())
    group_events_bytes = GROUP_EVENTS_BYTES + rollout.n_samples_per_prompt * SAMPLE_EVENT_BYTES
    return StreamSizes(
        event_bytes=logged_steps(recipe) * (STEP_EVENTS_BYTES + engine_bytes + groups * group_events_bytes),
        work_bytes=open_groups * (KIB + rollout.n_samples_per_prompt * (KIB + _text_bytes(recipe))),
        data_bytes=kept_batches(recipe) * groups * group_bytes(recipe),
        max_payload_bytes=max(
            _segments_bytes(recipe),
            max(_column_bytes(recipe), default=0),
            rollout.n_samples_per_prompt * _text_bytes(recipe),
        )
        + 64 * KIB,
    )


def stream_sizes(topology: Topology) -> StreamSizes:
    """Return the limits of a run: as configured, else the needed size with slack."""
    needed, bus = needed_sizes(topology), topology.bus
    return StreamSizes(
        event_bytes=bus.event_bytes or _derived(needed, "event_bytes"),
        work_bytes=bus.work_bytes or _derived(needed, "work_bytes"),
        data_bytes=bus.data_bytes or _derived(needed, "data_bytes"),
        max_payload_bytes=bus.max_payload_bytes or max(DEFAULT_MESSAGE_BYTES, _round_up(needed.max_payload_bytes)),
    )


def min_free_bytes(topology: Topology) -> int:
    """Return the least free disk space for the run directory in bytes: for one message, logs and the result."""
    stored_here = 0 if topology.bus.url is not None else stream_sizes(topology).max_payload_bytes
    return KEPT_FREE_BYTES + stored_here


def stream_limits(topology: Topology) -> StreamLimits:
    """Return the stream sizes and replicas as limits of the bus; its other limits keep their defaults."""
    sizes = stream_sizes(topology)
    return StreamLimits(
        event_bytes=sizes.event_bytes,
        work_bytes=sizes.work_bytes,
        data_bytes=sizes.data_bytes,
        replicas=topology.bus.replicas,
    )


def growing_events(recipe: Recipe) -> tuple[EventSize, ...]:
    """Return size bounds of the buffer, trainer and evaluation events that grow with the recipe.

    Not included: rollout events that user functions can enlarge, which fail their group when they are refused, and
    snapshots, which are stored in chunks when they are large.
    """
    rollout, refill = recipe.rollout, over_sampling_batch_size(recipe.rollout)
    asked = rollout.over_sampling_batch_size is not None
    refill_key = f"rollout.{'over_sampling_batch_size' if asked else 'rollout_batch_size'}"
    row_bytes = max((data.max_row_bytes for data in recipe.data), default=0)
    tokens_bytes = PROMPT_TOKEN_BYTES * min(row_bytes, max_prompt_len(rollout) or row_bytes)
    issued_bytes = ISSUED_GROUP_BYTES + CITED_PART_BYTES * (1 + (row_bytes + tokens_bytes) // PROMPT_PART_BYTES)
    evals = tuple(
        EventSize(
            events="eval.completed",
            key=f"eval.{index}.n_samples_per_eval_prompt",
            number=item.n_samples_per_eval_prompt,
            each_bytes=SAMPLE_EVENT_BYTES,
        )
        for index, item in enumerate(recipe.eval)
    )
    return (
        EventSize(events="groups_issued, groups_closed", key=refill_key, number=refill, each_bytes=issued_bytes),
        EventSize(
            events="batch_ready, payloads_missing",
            key="rollout.rollout_batch_size",
            number=rollout.rollout_batch_size,
            each_bytes=BATCHED_GROUP_BYTES,
        ),
        EventSize(
            events="batch_trained",
            key="rollout.rollout_batch_size",
            number=rollout.rollout_batch_size,
            each_bytes=UNTRAINED_GROUP_BYTES + rollout.n_samples_per_prompt * UNTRAINED_SAMPLE_BYTES,
        ),
        EventSize(
            events="eval_issued, eval_ended",
            key="eval",
            number=len(recipe.eval),
            each_bytes=EVAL_SET_BYTES
            + OWN_METRICS_BYTES * any(item.custom_metrics or item.custom_evaluation for item in recipe.eval),
        ),
        *evals,
    )


def kept_batches(recipe: Recipe) -> int:
    """Return the number of batches stored at once: since the last checkpoint, in flight, and spare."""
    train = recipe.train
    interval = min(train.save_interval or train.num_steps, train.num_steps)
    return interval + recipe.rollout.max_staleness + SPARE_BATCHES


def logged_steps(recipe: Recipe) -> int:
    """Return the number of steps in the log at once: from the oldest kept checkpoint to the next one."""
    train = recipe.train
    interval = min(train.save_interval or train.num_steps, train.num_steps)
    return min(train.num_steps, train.keep_checkpoints * interval + recipe.rollout.max_staleness + SPARE_BATCHES)


def group_bytes(recipe: Topology) -> int:
    """Return the payload bytes of one prompt group with samples of maximum length, and of their columns."""
    return _segments_bytes(recipe) + recipe.rollout.n_samples_per_prompt * sum(_column_bytes(recipe))


def _segments_bytes(recipe: Recipe) -> int:
    """Return the bytes of a group's segments, which may be one message."""
    each_bytes = RESPONSE_TOKEN_BYTES + _kept_bytes(recipe)
    tokens = PROMPT_TOKEN_BYTES * prompt_len_bound(recipe) + each_bytes * recipe.rollout.max_response_len
    return recipe.rollout.n_samples_per_prompt * (SAMPLE_BYTES + tokens)


def _column_bytes(recipe: Topology) -> list[int]:
    """Return the bytes of each column of a sample: a message of its own."""
    each_bytes = (COLUMN_TOKEN_BYTES + TOPK_TOKEN_BYTES * topk_of_column(recipe, name) for name in column_names(recipe))
    return [SAMPLE_BYTES + each * recipe.rollout.max_response_len for each in each_bytes]


def _kept_bytes(recipe: Recipe) -> int:
    """Return the bytes of a response token's kept tokens: their ids, and how many there are."""
    rollout = recipe.rollout
    return 4 * (1 + min(rollout.top_k, KEPT_TOKENS)) if rollout.return_sampling_mask else 0


def prompt_len_bound(recipe: Recipe) -> int:
    """Return the maximum prompt length to plan for, in tokens."""
    return max_prompt_len(recipe.rollout) or ASSUMED_PROMPT_LEN


def show_bytes(size: int) -> str:
    """Format a size: "256 MiB"."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if amount >= 10 or amount == int(amount) else f"{amount:.1f} {unit}"


def _count(engine: EngineConfig) -> int:
    try:
        return num_engines(engine)
    except ValueError:  # an unreadable GPU list: another rule reports it
        return 0


def _text_bytes(recipe: Recipe) -> int:
    token_bytes = TEXT_TOKEN_BYTES + (DEMONSTRATED_TOKEN_BYTES if trains_demonstrations(recipe) else 0)
    num_responses = 2 if trains_pairs(recipe) else 1
    return token_bytes * (prompt_len_bound(recipe) + num_responses * recipe.rollout.max_response_len)


def _derived(needed: StreamSizes, name: str) -> int:
    return max(FLOORS[name], _round_up(SLACK * getattr(needed, name)))


def _round_up(size: int) -> int:
    return -(-size // MIB) * MIB
