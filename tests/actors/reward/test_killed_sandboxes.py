"""A tenth of the sandboxes is killed: no sample gets a reward that its answer does not deserve, none is lost."""

import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from actors.reward import isolation
from actors.reward.frames import Graded, GraderSpec
from actors.reward.gradings import graded_again
from actors.reward.keeper import children_of
from actors.reward.recipe import retried_causes
from actors.reward.samples import GradedSample
from tests.actors.reward.test_pool import USER_CODE, pool_of
from tests.build.topology import topology_with

pytestmark = pytest.mark.anyio

SHARE = 0.1  # of the sandboxes that are killed
LOOK_S = 0.01  # between two looks at the living ones
LABEL = {"inputs": ["7"], "outputs": ["14"]}
MOST_DEEP = 4  # processes of a sandbox: the launcher, one for the run, the first of the namespace, the program


def distance(ours: list[int], theirs: list[int]) -> float:
    """The Kolmogorov-Smirnov distance of two samples of lengths."""
    shares = [[sum(one <= at for one in some) / len(some) for at in {*ours, *theirs}] for some in (ours, theirs)]
    return max(abs(one - other) for one, other in zip(*shares, strict=True))


@pytest.mark.parametrize("function", ["dies_once", "dies_once_async"])
async def test_zero_is_given_to_wrong_answers_alone_and_lengths_stay_as_issued(function: str, tmp_path: Path) -> None:
    grader = GraderSpec(name=f"{USER_CODE}:{function}")
    samples = [
        GradedSample(
            response=str(number % 3),
            label="0",
            response_len=10 + number,
            metadata={"marker": str(tmp_path / str(number)) if number % 10 == 5 else ""},
        )
        for number in range(60)
    ]
    async with pool_of(num_processes=2, timeout_s=10, max_tries=3, graders=(grader,)) as pool:
        with anyio.fail_after(25):
            grades = await pool.grade(grader, samples)
        assert pool.stats()["num_deaths"] >= 1
    assert len(os.listdir(tmp_path)) == 6  # each of these sandboxes was killed while it graded
    zeros = [sample for sample, graded in zip(samples, grades, strict=True) if graded.reward == 0.0]
    assert zeros == [sample for sample in samples if sample.response != sample.label]
    trained = [sample.response_len for sample, graded in zip(samples, grades, strict=True) if graded.reward is not None]
    assert distance(trained, [sample.response_len for sample in samples]) <= 0.05


def launchers_below(pid: int) -> Iterator[int]:
    """Processes that run a sandbox each, among the descendants of a process."""
    for child in children_of(pid):
        command = b""
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"/code/launcher.py" in command:
            yield child
        else:
            yield from launchers_below(child)


def sandbox_of(launcher: int) -> list[int]:
    """Processes of a sandbox without the program: a program may also kill itself, which is a wrong answer."""
    found = [launcher]
    while len(found) < MOST_DEEP - 1 and (children := children_of(found[-1])):
        found.append(children[0])
    return found


class Killer:
    """Kills a tenth of the sandboxes that it sees. The longer one lives, the more often it may be chosen."""

    def __init__(self) -> None:
        self.seen = set[int]()
        self.killed = set[int]()
        self._moments = random.Random(7)

    async def run(self) -> None:
        """Look at the sandboxes below this process until cancelled."""
        while True:
            living = [pid for pid in launchers_below(os.getpid()) if pid not in self.killed]
            self.seen.update(living)
            if living and len(self.killed) < SHARE * len(self.seen):
                launcher = self._moments.choice(living)
                with suppress(ProcessLookupError):
                    os.kill(self._moments.choice(sandbox_of(launcher)), signal.SIGKILL)
                    self.killed.add(launcher)
            await anyio.sleep(LOOK_S)


@pytest.mark.parametrize("number", [40, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)])])
async def test_a_killed_sandbox_of_a_program_is_no_wrong_answer(number: int) -> None:
    """Longer programs live longer, so without further tries they would be rarer among those that train."""
    lengths = [1 + place % 30 for place in range(number)]
    factors = [2 if place % 3 else 3 for place in range(number)]  # the label asks for the first
    samples = [
        GradedSample(
            response=f"import time\ntime.sleep({length / 200})\nprint({factor} * int(input()))",
            label=LABEL,
            response_len=length,
        )
        for length, factor in zip(lengths, factors, strict=True)
    ]
    if isolation.refusal() is not None:
        pytest.fail(f"this machine cannot isolate programs: {isolation.refusal()}")
    killer, causes = Killer(), retried_causes(topology_with().reward)
    grades: list[Graded] = []
    counts: dict[str, float] = {}
    async with (
        pool_of(num_processes=2, timeout_s=60, max_tries=3, graders=(GraderSpec(name="code"),)) as pool,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(killer.run)
        grades = await graded_again(
            lambda some: pool.grade(GraderSpec(name="code"), some), samples, causes=causes, max_tries=3, group=False
        )
        tasks.cancel_scope.cancel()
        counts = pool.stats()
    lost = [graded for graded in grades if graded.reward is None]
    zeros = [place for place, graded in enumerate(grades) if graded.reward == 0.0]
    trained = [sample.response_len for sample, graded in zip(samples, grades, strict=True) if graded.reward is not None]
    apart = distance(trained, lengths)
    sys.stdout.write(
        f"{number} samples, {len(killer.seen)} sandboxes seen, {len(killer.killed)} killed, "
        f"{counts['num_sandbox_lost_scores']:.0f} tries lost, {len(lost)} samples lost, {len(zeros)} zeros, "
        f"{factors.count(3)} wrong answers, distance {apart:.4f}\n"
    )
    assert len(killer.killed) >= 0.9 * SHARE * len(killer.seen) > 0
    assert zeros == [place for place, graded in enumerate(grades) if factors[place] == 3 and graded.reward is not None]
    assert {graded.cause for graded in lost} <= {"sandbox_lost"}
    assert len(lost) <= number / 100
    assert apart <= 0.05


def test_the_distance_by_hand() -> None:
    assert distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert distance([3, 4], [1, 2, 3, 4]) == 0.5
