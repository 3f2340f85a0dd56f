"""What users hand over may be wrong: the run goes on without what it spoils, or ends and says why."""

from pathlib import Path

import anyio
import pytest

from tests.chaos.audit import audit
from tests.chaos.harness import END_S, Run

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

GRADERS = Path(__file__).with_name("graders.py")
FAILED, WRONG_INPUT = 1, 2


async def end_of(run: Run) -> tuple[int, str]:
    """Exit code and output of a run that ends by itself, leaving nothing behind."""
    with anyio.fail_after(END_S):
        done = await anyio.run_process(run.command, cwd=run.output.parent, check=False)
    await run.gone()
    return done.returncode, done.stdout.decode() + done.stderr.decode()


async def test_a_grader_and_a_filter_that_fail_now_and_then_cost_those_groups_only(tmp_path: Path) -> None:
    overrides = (
        f"data.0.rm_type={GRADERS}:moody",
        f"eval.0.rm_type={GRADERS}:share_of_digits",
        f"rollout.dynamic_filter={GRADERS}:picky",
        "reward.timeout_s=1",
        "reward.max_tries=1",
        "reward.processes=4",
    )
    run = Run(tmp_path, num_steps=3, overrides=overrides)
    code, said = await end_of(run)
    assert code == 0, said
    books = await audit(run, ordered=False)
    assert books.failed > 0
    for reason in ("no labels that begin with 1", "timeout: no answer within 1 s (timeout_s)", "KeyError"):
        assert reason in said


@pytest.mark.parametrize(
    ("key", "function", "end", "reason"),
    [
        ("data.0.rm_type", "broken", WRONG_INPUT, "no_such_field"),
        ("rollout.dynamic_filter", "stuck", FAILED, "no verdict within 10 s"),
    ],
)
async def test_a_function_that_never_works_ends_the_run_with_its_reason(
    tmp_path: Path, key: str, function: str, end: int, reason: str
) -> None:
    barren = ("rollout.max_barren_groups=1",) if end == FAILED else ()  # else the first calls of the grader end it
    run = Run(tmp_path, num_steps=3, overrides=(f"{key}={GRADERS}:{function}", *barren))
    code, said = await end_of(run)
    assert code == end, said
    *_, failure = [line for line in said.splitlines() if line.startswith("run r failed")]
    assert reason in failure


async def test_a_broken_line_of_data_is_wrong_input_with_its_number(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1", "label": "1"}\n{"input": \n')
    run = Run(tmp_path, num_steps=3, overrides=(f"data.0.path={data}",))
    code, said = await end_of(run)
    assert code == WRONG_INPUT
    assert f"{data}:2" in said
