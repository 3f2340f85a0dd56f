"""What a recipe's sizes make of events: none that --check accepts is over what a reader takes."""

from pathlib import Path

import pytest

from messages import (
    BatchReady,
    BatchTrained,
    EvalCompleted,
    EvalEnded,
    EvalIssued,
    GroupRef,
    GroupsClosed,
    GroupsIssued,
    IssuedGroup,
    Message,
    SampleStatus,
    SampleSummary,
    SegmentRef,
    UntrainedSamples,
    encode,
)
from messages.ledger import EvalSetSize
from runtime.bus.limits import MAX_EVENT_BYTES
from runtime.settings.load import load_topology
from runtime.settings.sizes import growing_events
from tests.runtime.settings.shipped import LAPTOP, problems

LARGE = 10**12  # larger than any sequence or number of a group
EVAL = 'eval=[{name="t", path="x.jsonl", interval=1, n_samples_per_eval_prompt=%d}]'


def worst_cases() -> dict[str, list[Message]]:
    """Of each bound the events that it is for, for a thousand of what they grow with."""
    parts = tuple(range(LARGE, LARGE + 5))  # of a row of 16 MiB with a short prompt
    groups = tuple(IssuedGroup(group_id=LARGE, attempt=99, prompt=LARGE, prompt_parts=parts) for _ in range(1000))
    refs = tuple(GroupRef(group_id=LARGE, attempt=99, event_seq=LARGE) for _ in range(1000))
    names = [f"{number:064}" for number in range(1000)]
    metrics = {f"eval/{name}-pass@{2**k}": 1 / 3 for name in names for k in range(24)}
    sample = SampleSummary(
        index=LARGE,
        status=SampleStatus.TRUNCATED,
        segments=tuple(SegmentRef(seq=LARGE, position=999) for _ in range(4)),
        prompt_len=LARGE,
        response_len=LARGE,
        reward=1 / 3,
        first_version=LARGE,
        last_version=LARGE,
    )
    sizes = tuple(EvalSetSize(set=name, num_items=LARGE) for name in names)
    return {
        "groups_issued": [
            GroupsIssued(incarnation=1, round=LARGE, min_version=LARGE, groups=groups, num_samples=LARGE),
            GroupsClosed(incarnation=1, group_ids=(LARGE,) * 8000, outcome="dropped", reason="r"),
        ],
        "batch_ready": [BatchReady(incarnation=1, step=LARGE, groups=refs, passed_over=(LARGE,) * 2000)],
        "batch_trained": [
            BatchTrained(
                step=LARGE,
                incarnation=1,
                num_groups=1000,
                num_samples=LARGE,
                num_tokens=LARGE,
                metrics={},
                untrained=tuple(
                    UntrainedSamples(group_id=LARGE, reason="not_finite", samples=tuple((9999, 99) for _ in range(4)))
                    for _ in range(1000)
                ),
                skipped_groups=(LARGE,) * 1000,
            )
        ],
        "eval_issued": [
            EvalIssued(incarnation=1, step=LARGE, version=LARGE, sets=sizes),
            EvalEnded(incarnation=1, step=LARGE, version=LARGE, metrics=metrics),
        ],
        "eval.completed": [
            EvalCompleted(step=1, set="t", item=1, version=1, instance="i", samples=(sample,) * 1000),
        ],
    }


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.over_sampling_batch_size=100000", "rollout.over_sampling_batch_size"),
        ("rollout.rollout_batch_size=200000", "rollout.rollout_batch_size"),
        (EVAL % 100_000, "eval.0.n_samples_per_eval_prompt"),
    ],
)
def test_a_recipe_whose_events_no_reader_would_take_is_refused(override: str, key: str) -> None:
    message = problems(LAPTOP, override)[key]
    assert "could make an event (" in message
    assert "over the limit of 8 MiB; allowed: at most " in message


@pytest.mark.parametrize("name", worst_cases())
def test_the_bounds_are_bounds(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"input": "a", "label": "a"}\n')
    recipe = load_topology(LAPTOP, [EVAL % 1]).topology
    each = next(size.each_bytes for size in growing_events(recipe) if name in size.events)
    for event in worst_cases()[name]:
        assert len(encode(event).payload) <= 1000 * each + (64 << 10)
    assert 1000 * each < MAX_EVENT_BYTES
