"""kill -9 of one process after another while the run goes on: it finishes as if nothing had happened."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from messages import ActorExited, BatchReady, EvalIssued, StatsGiven, StatsRequested
from runtime.data.dump_files import read_pair, steps_in
from tests.chaos import evaluation_function
from tests.chaos.audit import audit, read_all
from tests.chaos.harness import BATCH_SIZE, EVENT_S, EVENTS_PER_STEP, NUM_SAMPLES, Command, Run, moments_of
from tests.chaos.test_twins import TWO_ROLLOUTS
from tests.fixtures.nats import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.anyio]

EVAL_ITEMS = 22  # of the held-out set
HERE = Path(__file__).parent
GRADERS = HERE / "graders.py"
ENVIRONMENT = Path(__file__).parents[2] / "topologies/examples/environment.py"


async def kill_in_turn(command: Command, names: list[str], *, every: int) -> None:
    """Kill a process after so many train steps and a random number of events, the next one as many steps later."""
    moments = moments_of(" ".join(names))
    for number, name in enumerate(names, start=1):
        await command.log.until_trained(number * every)
        await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
        await command.log.until_alive(name)
        command.log.kill(name)


def url_of(command: Command, engine: str) -> str:
    """Where an engine's newest process serves."""
    words = psutil.Process(command.log.pids[engine]).cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


async def finish(run: Run, command: Command) -> None:
    """Wait for the end of a run, which leaves nothing behind."""
    family = command.family()
    assert await command.end() == 0
    await run.gone(family)


async def test_buffer_and_bus_are_killed(tmp_path: Path) -> None:
    """With slow graders: answers that the dead server took along are asked for again. No dump is missing or wrong."""
    run = Run(tmp_path, num_steps=15, overrides=(f"data.0.rm_type={GRADERS}:slowly", "run.dump_details=dump"))
    names = ["nats-server", "buffer", "nats-server", "nats-server", "buffer", "nats-server"]
    async with run.started() as command:
        await kill_in_turn(command, names, every=2)
        await finish(run, command)
    await audit(run, killed=names)
    await check_dumps(run, tmp_path / "dump")


async def check_dumps(run: Run, dump: Path) -> None:
    """The dump of each step holds its groups, each with all its samples and their tokens."""
    assert steps_in(dump) == list(range(run.num_steps))
    async with run.reopened() as bus, bus.read(BatchReady) as batches:
        async for received in batches.so_far():
            batch = received.message
            groups = {group.group_id: group for group in read_pair(dump, batch.step)}
            assert list(groups) == [ref.group_id for ref in batch.groups]
            assert len(groups) == BATCH_SIZE
            for group in groups.values():
                assert {sample.step for sample in group.samples} == {batch.step}
                assert len(group.samples) == NUM_SAMPLES
                lengths = [sum(len(segment.response_ids) for segment in own) for own in group.segments]
                assert lengths == [sample.response_len for sample in group.samples]


@pytest.mark.nightly
async def test_one_rank_of_two_is_killed(tmp_path: Path) -> None:
    """The other rank then fails in its next collective, and both start again; CI kills one in test_broadcast.py."""
    run = Run(tmp_path, num_steps=8, overrides=("trainer.num_processes=2",))
    async with run.started() as command:
        await kill_in_turn(command, ["trainer.1"], every=4)
        await finish(run, command)
    await audit(run, killed=["trainer.1", "trainer.0"])


async def test_processes_are_killed_while_an_evaluation_runs(tmp_path: Path) -> None:
    """A function of metrics gets every sample once, whichever process died meanwhile."""
    overrides = (f"eval.0.custom_metrics={GRADERS}:count",)
    run = Run(tmp_path, num_steps=8, eval_interval=2, overrides=overrides)
    names = ["rollout", "engine.policy.0", "buffer"]
    moments = moments_of("evaluation")
    async with run.started() as command:
        for number, name in enumerate(names):
            await command.log.until(lambda event, step=2 * number: isinstance(event, EvalIssued) and event.step >= step)
            await command.log.pass_over(moments.randrange(EVAL_ITEMS))
            command.log.kill(name)
        await finish(run, command)
    await audit(run, killed=names)
    of_set = f"eval/{run.topology.eval[0].name}"
    counted = [(row[f"{of_set}/samples"], row[f"{of_set}/prompts"]) for row in run.rows() if of_set in row]
    assert counted == [(EVAL_ITEMS, EVAL_ITEMS)] * 5


async def test_processes_are_killed_while_an_evaluation_function_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins again, in the other one of two rollout actors or with its own, and goes on when another process dies.

    Its answers count once.
    """
    gate = tmp_path / "gate"
    monkeypatch.setenv(evaluation_function.GATE, str(gate))
    overrides = (
        f"eval.0.custom_evaluation={evaluation_function.__file__}:half_of_them",
        f"eval.0.custom_metrics={GRADERS}:count",
        "eval.0.n_samples_per_eval_prompt=2",
        *TWO_ROLLOUTS,
    )
    run, halves = Run(tmp_path, num_steps=3, eval_interval=2, overrides=overrides), evaluation_function.halves(gate)

    def starts() -> list[list[str]]:
        return [line.split() for line in halves.read_text().splitlines()] if halves.exists() else []

    async with run.started() as command:
        await command.log.until(lambda _: {"rollout.0", "rollout.1"} <= command.log.pids.keys())
        await command.log.until(lambda event: isinstance(event, EvalIssued))
        await eventually(lambda: len(starts()) == 1, timeout_s=EVENT_S)
        by_pid = {str(pid): name for name, pid in command.log.pids.items()}
        names = [by_pid[starts()[0][1]], "buffer", "engine.policy.0"]
        command.log.kill(names[0])
        await eventually(lambda: len(starts()) == 2, timeout_s=EVENT_S)
        for name in names[1:]:
            command.log.kill(name)
        gate.touch()
        await finish(run, command)
    await audit(run, killed=names)
    assert [step for step, _ in starts()] == ["0", "0", "2", "3"]
    of_set, num_asked = f"eval/{run.topology.eval[0].name}", EVAL_ITEMS // 2
    found = [
        (row[f"{of_set}/samples"], row[f"{of_set}/prompts"], row[f"{of_set}-not_asked"])
        for row in run.rows()
        if of_set in row
    ]
    assert found == [(num_asked + num_asked // 2, num_asked, EVAL_ITEMS - num_asked)] * 3


async def test_graders_are_killed_and_after_the_last_step_trainer_and_buffer(tmp_path: Path) -> None:
    """The reward actor replaces grader processes; the node daemon does not notice.

    The others die before the last checkpoint, its evaluation, the end of the run, or after: that is a race.
    """
    run = Run(tmp_path, num_steps=7)
    async with run.started() as command:
        moments = moments_of("graders")
        for steps in (1, 3, 5):
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            reward = psutil.Process(command.log.pids["reward"])
            await eventually(lambda reward=reward: len(reward.children()) == 2, timeout_s=EVENT_S)
            graders = reward.children()
            for grader in moments.sample(graders, moments.choice((1, 2))):
                grader.kill()
        await command.log.until_trained(6)
        with command.log.held():
            given = await command.bus.call("reward", StatsRequested(), StatsGiven, timeout_s=30)
            assert given.stats["num_starts"] > 2
        family = command.family()
        await command.log.until_trained(7)
        for name in ("trainer", "buffer"):
            with suppress(ProcessLookupError):
                command.log.kill(name)
        assert await command.end() == 0
        await run.gone(family)
    await audit(run, killed=None)
    async with run.reopened() as bus:
        log = [event for _, event in await read_all(bus, run)]
    assert not [
        event
        for event in log
        if isinstance(event, ActorExited) and event.actor == "reward" and event.reason != "stopped"
    ]


async def test_rollout_is_killed_while_groups_are_filtered_halted_and_carried_on(tmp_path: Path) -> None:
    """Over-sampling: the rounds end by halts, so that tokens of one attempt go on in the next."""
    overrides = (
        f"rollout.over_sampling_batch_size={3 * BATCH_SIZE // 2}",
        "rollout.dynamic_filter=nonzero_std",
        f"data.0.rm_type={GRADERS}:share_of_digits",
        "engines.policy.concurrency=32",
    )
    run, names = Run(tmp_path, num_steps=12, overrides=overrides), ["rollout", "rollout", "rollout"]
    async with run.started() as command:
        await kill_in_turn(command, names, every=3)
        await finish(run, command)
    books = await audit(run, killed=names, ordered=False)
    assert books.dropped > 0


async def test_every_process_is_killed_while_a_function_generates(tmp_path: Path) -> None:
    """Two conversations a sample, whose function gives the rewards: the books close as ever."""
    run = Run(tmp_path, num_steps=12, overrides=(f"rollout.custom_generate={ENVIRONMENT}:play",))
    names = ["rollout", "engine.policy.0", "nats-server", "buffer", "trainer"]
    async with run.started() as command:
        await kill_in_turn(command, names, every=2)
        await finish(run, command)
    await audit(run, killed=names)


@pytest.mark.parametrize(
    "function",
    [
        f"{HERE}/rollout_order.py:one_then_others",
        pytest.param(f"slime:{HERE}/slime_rollout.py:first_and_others", marks=pytest.mark.nightly),
    ],
    ids=["own", "of slime"],
)
async def test_processes_are_killed_while_a_rollout_function_generates(tmp_path: Path, function: str) -> None:
    """It gets up to four prompts at once, and runs again; no sample is lost, and none is trained twice."""
    overrides = (f"rollout.custom_rollout={function}", "rollout.custom_rollout_prompts=4")
    names = ["rollout", "engine.policy.0", "buffer"]
    run = Run(tmp_path, num_steps=2 * len(names) + 2, overrides=overrides)  # a kill is up to two steps after the last
    async with run.started() as command:
        await kill_in_turn(command, names, every=1)
        await finish(run, command)
    await audit(run, killed=names)


async def test_every_process_is_killed_while_it_starts_and_later_several_at_once(tmp_path: Path) -> None:
    run, moments = Run(tmp_path, num_steps=9), moments_of("several")
    async with run.started() as command:
        await command.log.until(lambda _: "buffer" in command.log.pids)  # the last one to be started
        killed = list(command.log.pids)
        for name in killed:
            command.log.kill(name)
        for steps in (2, 5):
            await command.log.until_trained(steps)
            await command.log.pass_over(moments.randrange(EVENTS_PER_STEP))
            await command.log.until_back()
            names = moments.sample(list(command.log.pids), 3)
            for name in names:
                command.log.kill(name)
            killed += names
        await finish(run, command)
    await audit(run, killed=killed)
