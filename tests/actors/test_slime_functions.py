"""Functions with slime's imports and signatures run as graders and dynamic filters; what is not provided is refused."""

import importlib.util
import subprocess
import sys
from array import array
from pathlib import Path

import anyio
import pytest

from actors.filter.filters import GroupSummary, verdict_of
from actors.reward.graders.stated import slime_dapo
from actors.reward.grades import GraderSpec, Hello
from actors.reward.pool import PoolSettings, open_pool
from actors.reward.samples import GradedSample
from messages.events import Outcome
from runtime.compat.slime.functions import PAGE, Args, DynamicFilterOutput, Sample, offer
from runtime.functions.load import PluginError, load
from runtime.functions.table import FILTER, GRADER, ROLLOUT, SOURCE, SOURCE_CLASS
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from tests.actors.rollout.samples.test_evaluation_function import KEY as EVALUATION
from tests.actors.rollout.samples.test_evaluation_function import with_function
from tests.actors.test_packed_arrays import lists_of_arrays
from tests.bin.test_try_function import on_prompts, said
from tests.support.checks import function_problems

ROOT = Path(__file__).parents[2]
HUB = "slime.rollout.filter_hub.dynamic_sampling_filters"
TRIED = """
def of_slime(args, rollout_id, data_buffer, evaluation=False):
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
    from slime.utils.async_utils import run

    (group,) = data_buffer.get_samples(args.rollout_batch_size)
    group = run(generate_and_rm_group(args, group, GenerateState(args).sampling_params))
    for sample in group:
        sample.reward += 10
    return [group]
"""
REWARDS = """
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_func(args, sample, **kwargs):  # as in examples/retool
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    result = compute_score(sample.prompt + sample.response, sample.label or "", strict_box_verify=True)
    if result["score"] < 0:
        num_turns = getattr(sample, "tool_call_count", 0)
        result["score"] = min(-0.6, result["score"] + (num_turns - 2) / 2 * 0.1)
    return result


def of_group(args, samples, **kwargs):
    return [float(sample.status is Sample.Status.COMPLETED and sample.response_length > 1) for sample in samples]


def reads_more(args, sample):
    return args.hf_checkpoint


def reads_fields(args, sample):
    return float(len(sample.rollout_log_probs))


def counts(args, sample):  # as examples/strands_sglang
    return float(len(sample.tokens) - sample.response_length) + sample.tokens[0] / 10


def generates(args, sample):
    GenerateState(args)


def filters(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput
    rewards = [sample.get_reward_value(args) for sample in samples]
    return DynamicFilterOutput(keep=max(rewards) > 0, reason="all_wrong")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def graded(folder: Path, name: str, *samples: GradedSample, group: bool = False) -> list[float | str | None]:
    async def ask() -> list[float | str | None]:
        settings = PoolSettings(hello=Hello(base_dirs=(str(folder),), reward_key="score"), num_processes=1)
        with anyio.fail_after(200):
            async with open_pool(settings) as pool:
                grades = await pool.grade(GraderSpec(name=f"slime:mine.py:{name}", group=group), samples)
        return [grade.reward if grade.error is None else grade.error for grade in grades]

    return anyio.run(ask)


def test_a_reward_function_of_slime_grades_in_a_grader_process(folder: Path) -> None:
    right, wrong = GradedSample(response=r"\boxed{42}", label="42"), GradedSample(response="41", label="42")
    calls = GradedSample(response="41", label="42", sample_metadata={"tool_call_count": 4})
    # -1 + (0 - 2) / 2 * 0.1 and -1 + (4 - 2) / 2 * 0.1
    assert graded(folder, "reward_func", right, wrong, calls) == [1.0, -1.1, -0.9]
    samples = [GradedSample(response_len=2), GradedSample(response_len=2, status="truncated")]
    assert graded(folder, "of_group", *samples, group=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("reads_more", "args.hf_checkpoint is not provided"),
        ("reads_fields", "sample.rollout_log_probs is not provided"),
        ("counts", 'a reward function gets them with reward.sample_fields = ["prompt_ids", "tokens"]'),
        ("generates", "only generate and rollout functions have it"),
    ],
)
def test_what_is_not_provided_is_an_error_that_names_the_page(folder: Path, name: str, refusal: str) -> None:
    (error,) = graded(folder, name, GradedSample())
    assert refusal in str(error)
    assert PAGE in str(error)


def test_a_reward_function_of_slime_gets_the_tokens_of_prompt_and_response_on_request(folder: Path) -> None:
    prompt_ids, tokens = (array("i", ids).tobytes() for ids in ([5, 6], [7, 8, 9]))
    asked = GradedSample(response_len=3, packed_prompt_ids=prompt_ids, packed_tokens=tokens)
    assert graded(folder, "counts", asked) == [2.5]


def summary(*rewards: float) -> GroupSummary:
    return GroupSummary(
        group_id=1, attempt=1, data="d", indices=list(range(len(rewards))), rewards=list(rewards),
        scores=[None] * len(rewards), prompt_len=1, response_lens=[1] * len(rewards),
        statuses=["completed"] * len(rewards),
    )  # fmt: skip


def test_a_dynamic_filter_of_slime_judges_groups(folder: Path) -> None:
    own = load(FILTER, "k", "slime:mine.py:filters", [folder]).function
    assert verdict_of(own(summary(0.0, 1.0)), "own").outcome is Outcome.KEEP
    assert verdict_of(own(summary(0.0, 0.0)), "own").reason == "all_wrong"
    slimes = load(
        FILTER, "k", "slime:slime.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std"
    ).function
    assert verdict_of(slimes(summary(0.0, 1.0)), "slime").outcome is Outcome.KEEP
    assert verdict_of(slimes(summary(1.0, 1.0)), "slime").reason == "zero_std_1.0"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("from slime.utils.types import Samples", "cannot import name 'Samples'"),
        ("from slime.agent.sandbox import E2BSandbox", "slime.agent is not provided to functions of slime"),
        ("import slime; slime.train", "slime.train is not provided"),
    ],
)
def test_other_names_of_slime_are_refused_with_the_page(tmp_path: Path, text: str, refusal: str) -> None:
    (tmp_path / "other.py").write_text(f"{text}\ndef grade(args, sample):\n    return 0.0\n")
    with pytest.raises(PluginError, match=refusal) as caught:
        load(GRADER, "rm_type", "slime:other.py:grade", [tmp_path])
    assert PAGE in str(caught.value)
    assert "slime:other.py:grade" in str(caught.value)


def test_other_settings_take_no_function_of_slime(folder: Path) -> None:
    with pytest.raises(PluginError, match="functions of slime do not run here") as caught:
        load(SOURCE, "data.0.source", "slime:mine.py:reward_func")
    assert PAGE in str(caught.value)
    with pytest.raises(PluginError, match=r"is called with .args, rollout_id, data_buffer."):
        load(ROLLOUT, "rollout.custom_rollout", "slime:mine.py:reward_func", [folder])
    with pytest.raises(PluginError, match="classes of slime do not run here"):
        load(SOURCE_CLASS, "data.0.source_class", "slime:mine.py:Source")


def test_an_installed_slime_is_not_shadowed(tmp_path: Path) -> None:
    """In a fresh process: its own class is what a function imports, and gets."""
    types = tmp_path / "slime" / "utils"
    types.mkdir(parents=True)
    for package in (types.parent, types):
        (package / "__init__.py").write_text("")
    (types / "types.py").write_text(
        "import enum\nclass Sample:\n    class Status(enum.Enum):\n        COMPLETED = 'completed'\n"
        "    def __init__(self, **fields):\n        self.__dict__.update(fields)\n"
    )
    (tmp_path / "own.py").write_text(
        "import slime\nfrom slime.utils.types import Sample\n"
        "def grade(args, sample):\n    return (slime.__file__, type(sample) is Sample)\n"
    )
    program = (
        "from actors.reward.grades import GraderSpec\nfrom actors.reward.graders.calling import resolve_grader\n"
        "from actors.reward.samples import GradedSample\n"
        "print(*resolve_grader(GraderSpec(name='slime:own.py:grade'))(GradedSample()))"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == [str(tmp_path / "slime" / "__init__.py"), "True"], done.stderr


def test_names_that_are_not_provided_are_attribute_errors() -> None:
    assert not offer()
    assert importlib.util.find_spec("slime.utils.types") is not None
    for given in (Args(), Sample()):
        with pytest.raises(AttributeError, match=PAGE):
            given.nothing  # noqa: B018
    assert not hasattr(Sample(), "tool_call_count")
    assert DynamicFilterOutput(keep=True).reason is None
    assert slime_dapo(r"x \boxed{41} \boxed{42}", "42", strict_box_verify=True)["acc"] is True
    assert slime_dapo("Answer: 42", "42", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": ""}
    assert slime_dapo("Answer: 42", "42")["score"] == 1.0


def test_no_evaluation_function_is_of_slime() -> None:
    (found,) = [each for each in function_problems(with_function("slime:a:b")) if each.key == EVALUATION]
    assert "a function of slime returns" in found.message


def test_the_file_of_a_function_of_slime_is_found_beside_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sl.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TopologyError) as error:
        load_topology(ROOT / "topologies/laptop.toml", ("algorithm.tis={type='custom', function='slime:sl.py:tis'}",))
    assert [one.key for one in error.value.problems] == ["algorithm.tis.type"]


def test_only_the_ids_of_a_prompt_that_a_function_posts_become_a_list() -> None:
    files = (ROOT / "actors/rollout/slime").rglob("*.py")
    assert lists_of_arrays(files) == {"actors/rollout/slime/call.py": 1}


def test_a_rollout_function_is_tried_on_a_tiny_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tried.py").write_text(TRIED)
    code, text = said(capsys, "rollout", f"slime:{tmp_path / 'tried.py'}:of_slime", *on_prompts(tmp_path, "74"))
    assert (code, text.count(", reward 10")) == (0, 2)
