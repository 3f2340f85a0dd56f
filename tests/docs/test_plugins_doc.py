"""docs/train/{rewards,own-functions,filters,multi-turn}.md: functions are found, do what the pages say."""

import tomllib
from array import array
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from actors.buffer.deciding import selection
from actors.buffer.deciding.measuring import EvalSample, admitted
from actors.buffer.deciding.selection import Selection, chosen_of
from actors.filter.filters import KEEP, GroupSummary, verdict_of
from actors.reward.graders.builtin import BUILT_IN_GRADERS
from actors.reward.grades import GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample, Turn
from actors.rollout.pools.answering import PoolTurn
from actors.rollout.samples.conversation import Conversation, GenerateFunction
from actors.rollout.samples.sample import OpenSample
from messages import Int32Array, Prompt, SampleKey, SampleStatus, SamplingParams
from messages.events import Outcome
from runtime.functions.load import load
from runtime.functions.table import BUFFER_FILTER, FILTER, GENERATE, METRICS, OVER_SAMPLING_FILTER
from tests.docs.snippets import snippets
from tests.support.any_tokens import AnyTokens

TRAIN = Path(__file__).parents[2] / "docs" / "train"
PAGES = [TRAIN / f"{name}.md" for name in ("rewards", "own-functions", "filters", "multi-turn")]


def blocks(language: str) -> list[str]:
    """The blocks of one language on all pages, in order."""
    return [block for page in PAGES for block in snippets(page, language)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The pages' files; each block names its own in the first line."""
    for block in blocks("python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    return tmp_path


async def rewards_of(folder: Path, name: str, *samples: GradedSample, group: bool = False) -> list[float | None]:
    hello = Hello(base_dirs=(str(folder),), reward_key="score")
    with anyio.fail_after(200):
        async with open_pool(PoolSettings(hello=hello, num_processes=1)) as pool:
            grades = await pool.grade(GraderSpec(name=name, group=group), samples)
    assert [graded.error for graded in grades] == [None] * len(samples)
    return [graded.reward for graded in grades]


@pytest.mark.anyio
async def test_the_reward_functions_of_the_pages_work(folder: Path) -> None:
    right, wrong = GradedSample(response="it is 74", label=74), GradedSample(response="it is 47", label=74)
    assert await rewards_of(folder, "my_rewards.py:mentions_label", right, wrong) == [1.0, 0.0]
    brief = GradedSample(response="two words", metadata={"max_words": 2})
    assert await rewards_of(folder, "my_verifier.py:verify", brief, GradedSample(response="a " * 11)) == [1.0, 0.0]
    turns = (Turn(start=0, end=2), Turn(start=3, end=5))
    sure, unsure = ((array("f", [-9, -9, 0, -1, number]).tobytes()) for number in (-4.0, -6.0))
    turned = [GradedSample(packed_log_probs=log_probs, turn_spans=turns) for log_probs in (sure, unsure)]
    assert await rewards_of(folder, "my_turns.py:short_and_sure", *turned) == [1.0, 0.0]
    texts = ("ask </tool>", "it is 74")
    spoken = tuple(Turn(start=4 * place, end=4 * place + 2, text=text) for place, text in enumerate(texts))
    stepped = GradedSample(per="turn", label=74, response_len=6, turn_spans=spoken)
    assert await rewards_of(folder, "my_steps.py:per_turn", stepped) == [1.5]
    shared = [GradedSample(response=text) for text in ("1 of 4 words", "none")]
    assert await rewards_of(folder, "my_batches.py:shares", *shared, group=True) == [0.5, 0.0]
    group = [GradedSample(response_len=length) for length in (5, 3, 4)]
    assert await rewards_of(folder, "my_ranking.py:shortest_wins", *group, group=True) == [0.0, 1.0, 0.0]


def generating(folder: Path, name: str) -> GenerateFunction:
    return load(GENERATE, "rollout.custom_generate", name, [folder]).function


def summary(*rewards: float, response_len: int = 10) -> GroupSummary:
    return GroupSummary(
        group_id=1,
        attempt=1,
        data="d",
        indices=list(range(len(rewards))),
        rewards=list(rewards),
        scores=[None] * len(rewards),
        prompt_len=4,
        response_lens=[response_len] * len(rewards),
        statuses=["completed"] * len(rewards),
    )


def test_the_filter_of_the_pages_works(folder: Path) -> None:
    judge = load(FILTER, "rollout.dynamic_filter", "my_filters.py:one_is_right", [folder]).function
    assert verdict_of(judge(summary(0.0, 1.0)), "one_is_right") == KEEP
    dropped = [judge(summary(0.0, 0.5)), judge(summary(0.0, 1.0, response_len=3000))]
    assert [verdict_of(answer, "one_is_right").reason for answer in dropped] == ["none_right", "too_long"]
    assert verdict_of(dropped[0], "one_is_right").outcome is Outcome.DROP


def test_the_selections_of_the_pages_work(folder: Path) -> None:
    groups = [kept(0, 1.0, response_len=9), kept(1, 0.5, response_len=3), kept(2, 1.0, response_len=5)]
    choose = load(OVER_SAMPLING_FILTER, "k", "my_choice.py:right_and_short", [folder]).function
    assert choose is not None
    asked = Selection(kind="over_sampling_filter", groups=tuple(groups), count=2)
    assert chosen_of(asked, choose(groups)).group_ids == (2, 0, 1)
    left_out = msgspec.structs.replace(groups[1], indices=[0, 1], rewards=[None, 0.5], response_lens=[9, 3])
    assert chosen_of(asked, choose([left_out, groups[0]])).group_ids == (0, 1)
    choose = load(BUFFER_FILTER, "k", "my_choice.py:nearly_done", [folder]).function
    assert choose is not None
    asked = Selection(kind="buffer_filter", groups=tuple(groups), count=2)
    assert chosen_of(asked, choose(groups, 2)).group_ids == (0, 2)


def test_the_metrics_of_the_page_are_means(folder: Path) -> None:
    """Three prompts: two of three samples are right; the only one is wrong; none has a grade."""
    given = [
        (0, "7", 1.0, "add"),
        (0, "8", 0.0, "add"),
        (0, "7", 1.0, "add"),
        (1, "5", 0.0, "mul"),
        (2, "5", None, "mul"),
    ]
    samples = [
        EvalSample(
            item=item,
            index=index,
            part=0,
            prompt="p",
            label=7,
            metadata={"subject": subject},
            status="completed",
            response_len=1,
            reward=reward,
            score=None if reward is None else {"score": reward, "pred": pred},
            sample_metadata={},
        )
        for index, (item, pred, reward, subject) in enumerate(given)
    ]
    found = load(METRICS, "eval.0.custom_metrics", "my_metrics.py:by_subject", (folder,)).function(samples)
    assert admitted(found) == {"add": pytest.approx(2 / 3), "mul": 0.0}


@pytest.mark.anyio
async def test_the_generate_function_of_the_pages_works(folder: Path) -> None:
    turns, asked = ["<add>3 4</add>", "it is 7"], list[list[int]]()
    sample = OpenSample(index=0, prompt_len=1)

    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        buffer = sample.buffer
        assert (params.stop, limit) == (("</add>",), 100 - buffer.num_tokens - len(sample.pending))
        asked.append([*buffer.ids.tolist(), *sample.pending.tolist()])
        buffer.append_input(sample.pending)
        buffer.append(np.array([2]), np.array([-1.0]), turns[len(asked) - 1], "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), prompt.prompt_ids)
        sample.turn_status = SampleStatus.COMPLETED
        return False

    prompt = Prompt(data="d", row=0, text="3 and 4?", prompt_ids=Int32Array([1]))
    conversation = Conversation(
        prompt, sample, params=SamplingParams(max_new_tokens=100), ask=ask, model=AnyTokens(lambda text: [len(text)])
    )
    assert await conversation.run(generating(folder, "my_agent.py:adds")) is SampleStatus.COMPLETED
    assert conversation.text == "<add>3 4</add><sum>7</sum>it is 7"
    assert conversation.sample_metadata == {"sums": 1}
    assert asked == [[], [2, len("<sum>7</sum>")]]


@pytest.mark.anyio
async def test_the_further_conversations_of_the_pages_work(folder: Path) -> None:
    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        assert limit <= 64
        sample.buffer.append_input(sample.pending)
        sample.buffer.append(np.array([2, 3]), np.array([-1.0, -1.0]), "ab", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), sample.prompt_of(prompt.prompt_ids))
        sample.turn_status = SampleStatus.COMPLETED
        return False

    prompt = Prompt(data="d", row=0, text="3 and 4?", prompt_ids=Int32Array([1]))
    model = AnyTokens(lambda text: [len(text)])
    sample = OpenSample(index=0, prompt_len=1)
    conversation = Conversation(prompt, sample, params=SamplingParams(max_new_tokens=64), ask=ask, model=model)
    assert await conversation.run(generating(folder, "my_helper.py:asks_a_helper")) is SampleStatus.COMPLETED
    assert sample.siblings[1].own_score is not None
    assert sample.siblings[1].own_score.reward == 0.5
    sample = OpenSample(index=0, prompt_len=1)
    conversation = Conversation(prompt, sample, params=SamplingParams(max_new_tokens=66), ask=ask, model=model)
    assert await conversation.run(generating(folder, "my_helper.py:forgets")) is SampleStatus.COMPLETED
    go_on = len("<user>go on<assistant>")
    assert [sibling.prompt_of(prompt.prompt_ids).tolist() for sibling in sample.parts] == [[1], *[[1, 2, 3, go_on]] * 3]


@pytest.mark.anyio
async def test_another_model_makes_a_turn_of_the_function_of_the_page(folder: Path) -> None:
    async def ask(sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        await keep(sample)
        sample.turn_status = SampleStatus.COMPLETED
        return False

    async def keep(sample: OpenSample) -> None:
        if sample.buffer.num_tokens == sample.buffer.num_taken:
            sample.buffer.append(np.array([2, 3]), np.array([-1.0, -1.0]), "ab", "1@engine")
        sample.take(SampleKey(group_id=0, attempt=0, index=0), sample.prompt_of(prompt.prompt_ids))

    async def verifier(sample: OpenSample, ids: list[int], params: SamplingParams, limit: int) -> PoolTurn:
        assert (ids, limit) == ([1, 2, 3, asked], 16)
        return PoolTurn([5], None, "yes")

    prompt = Prompt(data="d", row=0, text="3 and 4?", prompt_ids=Int32Array([1]))
    asked = len("<user>is that right?<assistant>")
    sample, model = OpenSample(index=0, prompt_len=1), AnyTokens(lambda text: [len(text)])
    params, pools = SamplingParams(max_new_tokens=66), {"verifier": verifier}
    conversation = Conversation(prompt, sample, params=params, ask=ask, model=model, keep=keep, pools=pools)
    function = generating(folder, "my_verified.py:is_verified")
    assert await conversation.run(function) is SampleStatus.COMPLETED
    assert conversation.turns[-1] == ([5], [0.0], "yes")
    assert sample.untrained == ((3, 4),)


def kept(group_id: int, reward: float, *, response_len: int) -> selection.SelectableGroup:
    return selection.SelectableGroup(
        group_id=group_id,
        attempt=0,
        round=0,
        data="d",
        indices=[0],
        rewards=[reward],
        response_lens=[response_len],
        oldest_version=1,
        newest_version=1,
    )


def test_the_settings_of_the_pages_name_its_functions(folder: Path) -> None:
    tables = [tomllib.loads(block) for block in blocks("toml")]
    external = [name for table in tables for name in table.get("reward", {}).get("external", [])]
    assert external == ["humans"]
    used = [source["rm_type"] for table in tables for source in table.get("data", [])]
    sums = [name for table in tables for name in table.get("reward", {}).get("sums", {})]
    assert sums == ["quality"]
    assert set(used) - {"numeric", *external, *sums} == {"my_rewards.py:mentions_label"}
    rollout = [setting for table in tables for setting in table.get("rollout", {}).items()]
    names = [name for key, name in rollout if key not in ("pools", "custom_rollout_prompts")]
    assert "my_filters.py:one_is_right" in names
    for file, function in (name.split(":") for name in names):
        assert f"def {function}(" in (folder / file).read_text()


def test_the_page_lists_the_built_in_graders() -> None:
    table = PAGES[0].read_text().partition("\n## ")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert listed == list(BUILT_IN_GRADERS)
