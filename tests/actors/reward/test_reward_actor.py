"""The reward actor on a real bus."""

import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from actors.reward.actor import FIRST_GRADE_KEY, RewardActor
from actors.reward.process import GraderUnusableError
from messages import MessageDeadLettered, UserFunctionRaised
from messages.arrays import Float32Array, Int32Array
from messages.base import Plane
from messages.calls import Score, ScoresGiven
from messages.samples import SampleStatus
from messages.work import ScoreItem, ScoreRequested, TurnSpan
from runtime.bus.bus import Bus
from runtime.bus.scoring import ACK_WAIT_S, ScoreInbox
from runtime.functions.load import is_plugin
from runtime.process.actor import InputError
from runtime.process.first_calls import never_worked
from runtime.settings.tables.prompts import EvalConfig
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from tests.actors.reward.test_pool import AMPLE_S
from tests.build.topology import topology_with
from tests.fixtures.nats import NatsServer, eventually

pytestmark = pytest.mark.anyio

USER_CODE = str(Path(__file__).parent / "user_graders.py")
NASTY_CODE = str(Path(__file__).parent / "nasty_graders.py")
OWN = ("everything", "full", "as_told", "length", "slowly", "told", "never", "hangs")


def topology_of(*graders: str, **reward: Any) -> Topology:
    data = [{"name": f"d{place}", "path": "p", "rm_type": name} for place, name in enumerate(graders)]
    return topology_with(data=data, reward={"processes": 1, "timeout_s": AMPLE_S, **reward})


@asynccontextmanager
async def running(
    bus: Bus, *, graders: Sequence[str] = (), ack_wait_s: float = ACK_WAIT_S, **reward: Any
) -> AsyncGenerator[RewardActor]:
    own = {} if reward.get("group_rm") else {f"own-{name}": f"{USER_CODE}:{name}" for name in OWN}
    actor = RewardActor(topology_of(*graders, graders=own, **reward), bus, ack_wait_s=ack_wait_s)
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        yield actor
        group.cancel_scope.cancel()


class Asker:
    """Asks for scores as a rollout actor does."""

    def __init__(self, bus: Bus, inbox: ScoreInbox) -> None:
        self._bus = bus
        self._inbox = inbox
        self._num = 0

    async def ask(
        self,
        rm_type: str,
        *responses: str,
        group_rm: bool = False,
        timeout_s: float = AMPLE_S,
        reply_to: str | None = None,
        group_id: int = 1,
        own: bool | None = None,
        evaluation: bool = False,
        **item: Any,
    ) -> str:
        """Put a request into its grader's queue; by default one for a built-in grader into that of own actors."""
        self._num += 1
        items = tuple(
            ScoreItem(**{"index": index, "prompt": "p", "response": response, "status": SampleStatus.COMPLETED, **item})
            for index, response in enumerate(responses)
        )
        request = ScoreRequested(
            request_id=f"r{self._num}",
            reply_to="",
            group_id=group_id,
            own=not (rm_type.startswith("own-") or is_plugin(rm_type)) if own is None else own,
            attempt=1,
            rm_type=rm_type,
            group_rm=group_rm,
            timeout_s=timeout_s,
            evaluation=evaluation,
            items=items,
        )
        to = self._inbox.reply_to(request.token()) if reply_to is None else reply_to
        await self._bus.publish(msgspec.structs.replace(request, reply_to=to))
        return request.request_id

    async def answer(self, timeout_s: float = AMPLE_S) -> ScoresGiven:
        with anyio.fail_after(timeout_s):
            answer = await self._inbox.next(timeout_s)
        assert answer is not None
        return answer

    async def scores(self, rm_type: str, *responses: str, **options: Any) -> tuple[Score, ...]:
        request_id = await self.ask(rm_type, *responses, **options)
        answer = await self.answer()
        assert answer.request_id == request_id
        return answer.scores


@pytest.fixture
async def asker(bus: Bus) -> AsyncGenerator[Asker]:
    async with bus.score_inbox(lambda _: None) as inbox:
        yield Asker(bus, inbox)


async def until_work_is_done(bus: Bus) -> None:
    with anyio.fail_after(AMPLE_S):
        while (await bus.state(Plane.WORK)).messages:  # noqa: ASYNC110 - an ack is not answered
            await anyio.sleep(0.01)


async def test_a_request_is_answered_in_order_and_acked(bus: Bus, asker: Asker) -> None:
    async with running(bus, graders=["positional_match"]) as actor:
        scores = await asker.scores("positional_match", "74", "71", "", label="74")
        await until_work_is_done(bus)
        assert actor.stats()["num_requests"] == 1
    assert [(score.index, score.reward, score.error) for score in scores] == [
        (0, 1.0, None),
        (1, 0.5, None),
        (2, 0.0, None),
    ]


async def test_requests_for_an_async_grader_are_graded_together_within_its_limits(bus: Bus, asker: Asker) -> None:
    limits = {"own-told": {"requests_per_s": 1000}, "own-never": {"timeout_s": 0.5}}
    async with running(bus, limits=limits):
        asked = [await asker.ask("own-told", "meet 30") for _ in range(30)]
        late = await asker.ask("own-never", "")
        answers = [await asker.answer() for _ in range(31)]
    scores = {answer.request_id: answer.scores[0] for answer in answers}
    assert [scores[request_id].reward for request_id in asked] == [1.0] * 30
    assert (scores[late].cause, scores[late].error) == ("timeout", "timeout: no answer within 0.5 s (timeout_s)")


@pytest.mark.parametrize(
    "reply_to",
    [
        "phy.{}.event.ledger.round_halted",
        "a b",
        "_INBOX.other.x",
        "",
        "_INBOX.{}.rollout.x",
        "phy.{}.scores.math.x",
        "phy.other.scores._own.x",
        "phy.{}.scores._own.x.y",
    ],
)
async def test_a_request_to_be_answered_elsewhere_is_dead_lettered(bus: Bus, asker: Asker, reply_to: str) -> None:
    """A forged one put its answer among the ledger's events, or killed this actor again and again."""
    async with running(bus, graders=["positional_match"]):
        await asker.ask("positional_match", "74", label="74", reply_to=reply_to.format(bus.run))
        (score,) = await asker.scores("positional_match", "74", label="74")
        await until_work_is_done(bus)
    assert score.reward == 1.0
    assert await bus.last_ledger_seq() == 0
    async with bus.read(MessageDeadLettered) as events:
        assert ["takes no answers of the grader" in received.message.reason async for received in events.so_far()] == [
            True
        ]


async def test_a_grader_gets_what_the_generation_of_a_sample_left(bus: Bus, asker: Asker) -> None:
    given: dict[str, Any] = {
        "sample_metadata": {"steps": 2},
        "prompt_ids": Int32Array([3, 4]),
        "tokens": Int32Array([5, 6, 7]),
        "log_probs": Float32Array([-0.5, 0.0, -0.25]),
        "turns": (TurnSpan(start=0, end=1, text="a"), TurnSpan(start=2, end=3, text="b")),
    }
    async with running(bus, reward_key="score"):
        (full,) = await asker.scores("own-full", "r", evaluation=True, **given)
        (bare,) = await asker.scores("own-full", "r")
    assert full.details is not None
    turns = [[0, 1, "a"], [2, 3, "b"]]
    assert full.details["seen"] == [[3, 4], [5, 6, 7], [-0.5, 0.0, -0.25], turns, {"steps": 2}, True]
    assert bare.cause == "raised"
    assert 'add "log_probs" to reward.sample_fields' in (bare.error or "")


async def test_of_an_answer_that_is_too_long_the_rewards_are_sent(bus: Bus, asker: Asker) -> None:
    """It ended this actor, which got it again."""
    async with running(bus, reward_key="score", graders=[f"{USER_CODE}:chatty"]):
        scores = await asker.scores(f"{USER_CODE}:chatty", *["x"] * 300)
        await until_work_is_done(bus)
    assert [(score.reward, score.details) for score in scores] == [(0.5, None)] * 300


async def test_a_truncated_sample_is_known_to_the_grader(bus: Bus, asker: Asker) -> None:
    async with running(bus):
        (score,) = await asker.scores("positional_match", "74", label="74", status=SampleStatus.TRUNCATED)
    assert score.reward == 0.0


async def test_a_dict_answer_gives_reward_and_details(bus: Bus, asker: Asker) -> None:
    async with running(bus, reward_key="score"):
        (score,) = await asker.scores("own-everything", "r", label="l", metadata={"k": 1}, part=2)
    assert (score.part, score.reward) == (2, 0.5)
    assert score.details == {"score": 0.5, "seen": [0, "p", "r", "l", {"k": 1}, "completed"]}


async def test_a_group_is_scored_in_one_call(bus: Bus, asker: Asker) -> None:
    async with running(bus, group_rm=True, graders=[f"{USER_CODE}:rank"]):
        scores = await asker.scores(f"{USER_CODE}:rank", "a", "abc", "ab", group_rm=True)
    assert [score.reward for score in scores] == [0.0, 1.0, 0.0]


async def test_bad_graders_fail_their_samples_and_nothing_else(bus: Bus, asker: Asker) -> None:
    async with running(bus, max_tries=2, limits={"own-hangs": {"timeout_s": 1.0}}):
        hung = await asker.ask("own-hangs", "")
        asked = await asker.ask("own-as_told", "fine", "raise", "_exit", "nan", "text", "fine")
        answers = {answer.request_id: answer.scores for answer in [await asker.answer(), await asker.answer()]}
        await until_work_is_done(bus)
    scores = answers[asked]
    assert [score.reward for score in scores] == [1.0, None, None, None, None, 1.0]
    assert [score.error for score in scores][1:-1] == [
        "raised RuntimeError('as told')",
        "the grader process exited with code 7, 2 times",
        "returned nan, not a finite number",
        "returned 'good' (str), not a number",
    ]
    assert [score.error for score in answers[hung]] == ["timeout: no answer within 1 s (timeout_s)"]


async def test_code_that_the_topology_does_not_name_is_not_run(bus: Bus, asker: Asker, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.py"
    foreign.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\ndef f(sample): return 1.0\n")
    async with running(bus, graders=["exact_match"]):
        (by_file,) = await asker.scores(f"{foreign}:f", "r", own=True)
        (by_module,) = await asker.scores("tests.actors.reward.user_graders:length", "r", own=True)
        (built_in,) = await asker.scores("positional_match", "7", label="7")
        await until_work_is_done(bus)
    assert by_file.error == f"'{foreign}:f' is neither a built-in grader nor named by the topology"
    assert "nor named by the topology" in str(by_module.error)
    assert built_in.reward == 1.0
    assert not (tmp_path / "ran").exists()


async def test_each_named_grader_has_a_queue_of_its_own(bus: Bus, asker: Asker) -> None:
    """All of them, and that of the run's own actors: one actor pulls them all."""
    async with running(bus, graders=["positional_match", "exact_match"]):
        rewards = [
            (await asker.scores(name, "74", label="71", own=own))[0].reward
            for name, own in (("positional_match", False), ("exact_match", False), ("exact_match", True))
        ]
        (own_code,) = await asker.scores("own-length", "four")
    assert [*rewards, own_code.reward] == [0.5, 0.0, 0.0, 4.0]


async def test_a_grader_of_external_workers_is_not_pulled(bus: Bus, asker: Asker) -> None:
    async with running(bus, graders=["exact_match", "judge"], external=["judge"]) as actor:
        await asker.ask("judge", "r", own=False)
        await asker.scores("exact_match", "7", label="7", own=False)
        assert actor.stats()["num_requests"] == 1

        async def one_left() -> bool:
            return (await bus.state(Plane.WORK)).messages == 1

        await eventually(one_left)


async def test_an_answer_over_the_size_of_a_message_goes_without_its_details(bus: Bus, asker: Asker) -> None:
    name = f"{NASTY_CODE}:answers_much"
    async with running(bus, graders=[name], reward_key="score", processes=2):
        scores = await asker.scores(name, *["r"] * 300)  # of 31 KB each
        await until_work_is_done(bus)
    assert {score.reward for score in scores} == {1.0}
    assert {score.error for score in scores} == {None}
    assert [score.details for score in scores] == [None] * 300


@pytest.mark.parametrize("garbage", ["length", "no struct", "deep", "half"])
async def test_garbage_on_the_pipe_of_a_grader_fails_its_sample_and_not_the_actor(
    bus: Bus, asker: Asker, garbage: str
) -> None:
    name = f"{NASTY_CODE}:writes_to_the_pipe"
    async with running(bus, graders=[name, "exact_match"], max_tries=2):
        (failed,) = await asker.scores(name, garbage)
        (good,) = await asker.scores("exact_match", "7", label="7")
    assert failed.reward is None
    assert failed.error is not None
    assert good.reward == 1.0


async def test_a_late_request_is_acked_without_an_answer(bus: Bus, asker: Asker) -> None:
    await asker.ask("own-length", "late", timeout_s=1e-6)
    async with running(bus) as actor:
        (score,) = await asker.scores("own-length", "four")  # the first answer is not of the late request
        await until_work_is_done(bus)
        assert actor.stats()["num_late_requests"] == 1
    assert score.reward == 4.0


async def test_a_request_that_becomes_late_is_given_up(bus: Bus, asker: Asker) -> None:
    async with running(bus) as actor:
        await asker.ask("own-as_told", "sleep", timeout_s=0.3)
        await until_work_is_done(bus)
        assert actor.stats()["num_late_requests"] == 1


async def begin(asker: Asker, tmp_path: Path) -> str:
    """Ask for a score whose grader waits for the file `go`, and wait until it has begun."""
    files = {"file": str(tmp_path / "go"), "started": str(tmp_path / "started")}
    request_id = await asker.ask("own-as_told", "wait for file", metadata=files)
    with anyio.fail_after(AMPLE_S):
        while not await anyio.Path(files["started"]).exists():  # noqa: ASYNC110 - a file has no event
            await anyio.sleep(0.01)
    return request_id


async def test_a_grader_that_takes_its_time_is_named(bus: Bus, asker: Asker, tmp_path: Path) -> None:
    async with running(bus) as actor:
        assert actor.waits_for() == "score requests"
        await begin(asker, tmp_path)
        waits = actor.waits_for()
        await anyio.Path(tmp_path / "go").touch()
        await until_work_is_done(bus)
    assert waits.startswith("graders: 1 score request; own-as_told has been grading the oldest for ")


async def test_a_stopped_actor_gives_its_requests_back_at_once(bus: Bus, asker: Asker, tmp_path: Path) -> None:
    ack_wait_s = 600.0  # so that the server gives it to nobody else
    async with running(bus, ack_wait_s=ack_wait_s):
        request_id = await begin(asker, tmp_path)
    await anyio.Path(tmp_path / "go").touch()
    async with running(bus, ack_wait_s=ack_wait_s):
        answer = await asker.answer()
    assert answer.request_id == request_id
    assert [score.reward for score in answer.scores] == [1.0]


ACTOR_PROCESS = """
import sys, anyio, msgspec
from actors.reward.actor import RewardActor
from runtime.bus.bus import Bus
from runtime.settings.topology import Topology
from tests.fixtures.nats import NatsServer

async def main(url, run, topology):
    async with Bus.connect(url, run, name="reward") as bus:
        await RewardActor(msgspec.json.decode(topology, type=Topology), bus, ack_wait_s=1.0).run()

anyio.run(main, *sys.argv[1:])
"""


async def test_a_request_of_a_killed_actor_goes_to_another(
    bus: Bus, asker: Asker, tmp_path: Path, nats_server: NatsServer
) -> None:
    own = {"own-as_told": f"{USER_CODE}:as_told"}
    topology = msgspec.json.encode(topology_of(graders=own)).decode()
    command = [sys.executable, "-c", ACTOR_PROCESS, nats_server.url, bus.run, topology]
    async with await anyio.open_process(command, stdin=None, stdout=None, stderr=None) as killed:
        request_id = await begin(asker, tmp_path)
        killed.kill()
    await anyio.Path(tmp_path / "go").touch()
    async with running(bus, ack_wait_s=1.0):
        answer = await asker.answer()
    assert answer.request_id == request_id
    assert [score.reward for score in answer.scores] == [1.0]


async def test_two_actors_share_the_requests(bus: Bus, asker: Asker) -> None:
    async with (
        running(bus, concurrency=4) as first,
        running(bus, concurrency=4) as second,
    ):
        asked = {await asker.ask("own-slowly", "abc") for _ in range(40)}
        answered = {(await asker.answer()).request_id for _ in range(40)}
        assert answered == asked
        shares = [actor.stats()["num_requests"] for actor in (first, second)]
    assert sum(shares) == 40
    assert min(shares) > 0


async def test_a_grader_known_at_start_must_be_usable(bus: Bus) -> None:
    actor = RewardActor(topology_of("no_such_grader"), bus)
    with pytest.raises(GraderUnusableError, match="no grader 'no_such_grader'"):
        await actor.run()


def test_the_actor_is_light() -> None:
    code = "import sys, actors.reward.actor; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_a_grader_that_fails_from_its_first_call_on_ends_the_run(bus: Bus, asker: Asker) -> None:
    async def ask() -> None:
        async with running(bus):
            for group_id in (1, 2, 3):
                await asker.scores("own-as_told", *["raise"] * 3, group_id=group_id)
            await asker.ask("own-as_told", "text", group_id=4)
            await anyio.sleep(AMPLE_S)

    with pytest.raises(ExceptionGroup) as caught:
        await ask()
    (error,) = flatten(caught.value)
    assert isinstance(error, InputError)
    assert str(error).startswith("the first 10 calls of graders in this run, for 4 prompt groups, all failed; ")
    assert f"{USER_CODE}:as_told: returned 'good' (str), not a number" in str(error)
    async with bus.read(UserFunctionRaised) as events:  # once for nine samples
        first, second = await events.next(timeout_s=AMPLE_S), await events.next(timeout_s=0.1)
    assert first is not None
    assert first.message.function == f"{USER_CODE}:as_told"
    assert f'File "{USER_CODE}"' in first.message.traceback.splitlines()[1]
    assert second is None


@pytest.mark.parametrize(
    ("failed_calls", "ends"),
    [
        ({}, False),
        ({1: 8}, False),  # one bad prompt, n_samples_per_prompt = 8
        ({1: 64, 2: 64, 3: 64}, False),  # three bad prompts
        ({1: 5, 2: 1, 3: 1, 4: 1}, True),
        ({1: 2, 2: 2, 3: 2, 4: 1}, False),  # seven calls
        ({group_id: 1 for group_id in range(7)}, False),
        ({group_id: 1 for group_id in range(8)}, True),
    ],
)
def test_first_calls_end_a_run_from_eight_calls_and_four_groups(failed_calls: dict[int, int], ends: bool) -> None:
    assert never_worked(failed_calls) is ends


async def test_bad_first_prompts_alone_end_no_run(bus: Bus, asker: Asker) -> None:
    async with running(bus):
        for group_id in (1, 2, 3):
            assert len(await asker.scores("own-as_told", *["raise"] * 8, group_id=group_id)) == 8
        await asker.scores("own-as_told", "fine", group_id=4)
        assert await bus.kv.get(FIRST_GRADE_KEY, bool)


async def test_a_grader_that_was_good_once_may_fail_ever_after(bus: Bus, asker: Asker) -> None:
    async with running(bus):
        await asker.scores("own-as_told", *["raise"] * 7)
        await asker.scores("own-as_told", "fine")
        for group_id in range(2, 6):
            assert len(await asker.scores("own-as_told", *["raise"] * 5, group_id=group_id)) == 5
    async with running(bus):  # started again
        for group_id in range(6, 10):
            assert len(await asker.scores("own-as_told", *["raise"] * 5, group_id=group_id)) == 5


async def test_good_grades_of_an_evaluation_hide_no_grader_that_never_works(bus: Bus) -> None:
    topology = msgspec.structs.replace(
        topology_of(f"{USER_CODE}:as_told"),
        eval=(EvalConfig(name="e", path="p", interval=1, rm_type="exact_match"),),
    )
    actor = RewardActor(topology, bus)
    async with anyio.create_task_group() as group, bus.score_inbox(lambda _: None) as inbox:
        await group.start(actor.run)
        await Asker(bus, inbox).scores("exact_match", *["7"] * 20, label="7")
        group.cancel_scope.cancel()
    assert await bus.kv.get(FIRST_GRADE_KEY, bool) is None


@pytest.mark.slow
async def test_graders_that_are_only_slow_never_end_a_run(bus: Bus, asker: Asker) -> None:
    async with running(bus, timeout_s=0.05):
        for group_id in range(4):
            scores = await asker.scores("own-as_told", *["sleep"] * 3, group_id=group_id)
            assert {score.error for score in scores} == {"timeout: no answer within 0.05 s (timeout_s)"}


async def test_a_call_for_a_whole_group_counts_once(bus: Bus, asker: Asker) -> None:
    name = f"{USER_CODE}:rank_wrongly"
    async with running(bus, group_rm=True, graders=[name]):
        for group_id in range(7):
            assert len(await asker.scores(name, *["a"] * 2, group_rm=True, group_id=group_id)) == 2
