"""Tasks that carry out the ledger's decisions. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from actors.buffer.deciding.decide import EvalPlan, Schedule
from messages import (
    EvalCompleted,
    EvalRequested,
    EvalSetRequested,
    GroupAborted,
    GroupCompleted,
    GroupFailed,
    Message,
    Prompt,
    RolloutRequested,
    SampleSummary,
)
from messages.plain import clipped
from runtime.data.stored_prompts import cited
from runtime.ledger.fold import Evaluation, Group, LedgerState, Stage
from runtime.ledger.groups import longest
from runtime.ledger.spills import spilled_samples
from runtime.settings.derived import (
    eval_request,
    needs_baseline,
    over_sampling_batch_size,
    rollout_sampling,
    sampling_params,
    trains_pairs,
)
from runtime.settings.owners import rollout_places
from runtime.settings.topology import Topology, is_colocated

Task = RolloutRequested | EvalRequested | EvalSetRequested

MAX_REASON_CHARS = 1000
BARREN_REFILLS = 16  # a run fails after this many refills in a row without a kept group


class Prompts(Protocol):
    """Training prompts by their number, counted over epochs."""

    def prompt(self, number: int) -> Prompt:
        """The prompt with this number."""
        ...


def schedule_of(topology: Topology, eval_sizes: Mapping[str, int]) -> Schedule:
    """Extract the settings that decisions need.

    Args:
        topology: the topology, with its recipe.
        eval_sizes: number of prompts of each evaluation set.
    """
    rollout = topology.rollout
    evals = tuple(
        EvalPlan(
            name=item.name,
            interval=item.interval,
            num_items=eval_sizes[item.name],
            skip_before_train=item.skip_eval_before_train,
            keeps=item.custom_metrics is not None,
            has_function=item.custom_evaluation is not None,
        )
        for item in topology.eval
        if not trains_pairs(topology)  # the trainer evaluates pairs
    )
    return Schedule(
        num_steps=topology.train.num_steps,
        rollout_batch_size=rollout.rollout_batch_size,
        over_sampling_batch_size=over_sampling_batch_size(rollout),
        num_samples=rollout.n_samples_per_prompt,
        refill=rollout.refill,
        over_sampling_filter=rollout.over_sampling_filter,
        buffer_filter=rollout.buffer_filter,
        keep_when_insufficient=rollout.keep_when_insufficient,
        max_staleness=rollout.max_staleness,
        max_token_staleness=rollout.max_token_staleness if rollout.stale_tokens == "drop" else None,
        halts=rollout.release_when == "batch_ready" or not is_colocated(topology),
        on_halt=rollout.on_halt,
        on_surplus=rollout.on_surplus,
        max_attempts=rollout.max_attempts,
        max_barren_groups=rollout.max_barren_groups or BARREN_REFILLS * over_sampling_batch_size(rollout),
        evals=evals,
        eval_overlap=rollout.eval_overlap,
    )


def rollout_task(topology: Topology, group: Group, prompts: Prompts, state: LedgerState) -> RolloutRequested:
    """Build the task of an issued group.

    Args:
        topology: the topology, with its recipe.
        group: a group in flight.
        prompts: the run's training prompts.
        state: the ledger, with the train steps of each weight version.
    """
    step, prompt = group.round - state.rounds_ahead, prompts.prompt(group.prompt)
    carried = group.carried if topology.rollout.on_halt == "resume" else ()
    carried = tuple(sample for sample in carried if not _too_old(topology, sample, step, state.version_steps))
    num_samples = group.num_samples or topology.rollout.n_samples_per_prompt  # a resumed run may have another recipe
    baseline = needs_baseline(topology.algorithm)
    return RolloutRequested(
        group_id=group.group_id,
        attempt=group.attempt,
        round=group.round,
        min_version=group.min_version,
        prompt=cited(prompt, group.prompt_parts) if group.prompt_parts else prompt,
        num_samples=num_samples,
        sampling=sampling_params(topology.rollout, rollout_sampling(topology), len(prompt.prompt_ids), trains=True),
        baseline=baseline,
        carried=tuple(
            sample for sample in longest(carried, spilled_samples(group)) if sample.index < num_samples + baseline
        ),
    )


class PrefixHolders:
    """Remembers which of several rollout actors aborted a group: its functions or its tokens are there.

    A hint for the next attempt, not part of the ledger: a buffer that starts again knows none.
    """

    def __init__(self, topology: Topology) -> None:
        self._is_needed = len(rollout_places(topology)) > 1 and topology.rollout.on_halt == "resume"
        # instances, and numbers of functions, by group, until the group is issued again or ends
        self._holders: dict[int, tuple[str, int]] = {}

    def note(self, event: Message) -> None:
        """Note an event of the log."""
        match event:
            case GroupAborted() if self._is_needed and (
                event.held or any(sample.response_len for sample in event.samples)
            ):
                self._holders[event.group_id] = event.instance, event.held or 0
            case GroupAborted() | GroupCompleted() | GroupFailed():
                self._holders.pop(event.group_id, None)
            case _:
                pass

    def hinted(self, task: Task) -> Task:
        """Return the task of a new attempt with the actor that should take it, if one is known."""
        holder = self._holders.pop(task.group_id, None) if isinstance(task, RolloutRequested) else None
        if holder is None or not isinstance(task, RolloutRequested) or not task.carried:
            return task
        instance, num_held = holder
        return msgspec.structs.replace(task, prefers=instance, held=num_held or UNSET)


def _too_old(topology: Topology, sample: SampleSummary, step: int, steps: Mapping[int, int]) -> bool:
    """Whether a sample must start over, because the age of its tokens would get its group dropped."""
    limit = topology.rollout.max_token_staleness
    if limit is None or topology.rollout.stale_tokens != "drop" or sample.first_version is None:
        return False
    return step - steps.get(sample.first_version, step) > limit


def tasks_in_flight(topology: Topology, state: LedgerState, prompts: Prompts) -> Iterator[RolloutRequested]:
    """Yield the tasks of all groups in flight."""
    for group in state.groups.values():
        if group.stage is Stage.IN_FLIGHT:
            yield rollout_task(topology, group, prompts, state)


def eval_tasks(
    topology: Topology, evaluation: Evaluation, eval_prompts: Mapping[str, Sequence[Prompt]]
) -> Iterator[EvalRequested | EvalSetRequested]:
    """Yield the tasks of a running evaluation's open items; first those of whole sets, which take longest."""
    for item in topology.eval:
        size = evaluation.sizes.get(item.name, 0)
        if item.custom_evaluation is not None and len(evaluation.items.get(item.name, ())) < size:
            yield EvalSetRequested(
                step=evaluation.step,
                set=item.name,
                version=evaluation.version,
                num_items=size,
                prompts=tuple(eval_prompts[item.name]),
            )
    for item in topology.eval:
        if item.name not in evaluation.sizes or item.custom_evaluation is not None:
            continue
        ended = evaluation.items[item.name]
        for number, prompt in enumerate(eval_prompts[item.name]):
            if number not in ended:
                num_samples, version = item.n_samples_per_eval_prompt, evaluation.version
                yield eval_request(
                    topology, item, number, prompt, step=evaluation.step, version=version, num_samples=num_samples
                )


def failed_endings(task: Task, reason: str, instance: str) -> Iterator[GroupFailed | EvalCompleted]:
    """The endings of a task that the bus refuses as a message. The buffer publishes them instead of a rollout actor."""
    reason = f"task: {clipped(reason, MAX_REASON_CHARS)}"
    if isinstance(task, RolloutRequested):
        yield GroupFailed(
            group_id=task.group_id,
            attempt=task.attempt,
            lease="",
            round=task.round,
            instance=instance,
            reason=reason,
        )
        return
    is_set = isinstance(task, EvalSetRequested)
    for item in range(task.num_items) if is_set else (task.item,):
        yield EvalCompleted(
            step=task.step,
            set=task.set,
            item=item,
            version=task.version,
            instance=instance,
            samples=(),
            failed=reason if is_set else "",
        )
