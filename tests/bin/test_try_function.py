"""bin/try calls a user's function as a run does and prints what it returns."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from actors.buffer.prompts.source import first_prompts
from bin import try_function
from runtime.data.dump_files import write_pair
from runtime.settings.load import load_topology
from tests.bin.test_replay import group
from tests.support import judging
from tests.support.judging import ScriptedJudge, serving

FUNCTIONS = """
import time

def equal(sample):
    return float(sample.response == sample.label)

def raises(sample):
    return {}["nothing"]

def hangs(sample):
    time.sleep(99)

def of_tokens(sample):
    (turn,) = sample.turns
    return float(0 < len(sample.tokens) == len(sample.log_probs) == turn.end == sample.response_len)

def together(samples):
    return [index for index, sample in enumerate(samples)]

def numbers(number):
    return {"input": str(number)}

class Doubles:
    def __init__(self):
        self.number = 1

    def draw(self, number):
        self.number *= 2
        return {"input": str(self.number)}

    def state(self):
        return self.number

    def restore(self, state):
        self.number = state

class Sulks(Doubles):
    def told(self, outcome):
        raise ValueError("told so")

class Stops(Doubles):
    def draw(self, number):
        return {"input": "1"} if number == 0 else 1 / 0

class Forgets(Doubles):
    def restore(self, state):
        pass

counted = iter(range(99))

def changes(number):
    return {"input": str(next(counted))}

def of_set(samples):
    rewards = [sample.reward for sample in samples]
    return {"mean": sum(rewards) / len(rewards), "prompts": len({sample.item for sample in samples})}

async def plays(conversation):
    await conversation.generate(max_new_tokens=4)
    if conversation.label == "decides":
        helper = conversation.open("<user>", conversation.turns[0].ids, "<assistant>")
        await helper.generate(max_new_tokens=1)
        helper.do_not_train()
        conversation.reward = 0.5
        conversation.sample_metadata["turns"] = len(conversation.turns)
    if conversation.label == "raises":
        {}["nothing"]
    if conversation.label == "fails":
        conversation.end("failed", "no such page")
    if conversation.label == "text":
        conversation.reward = "1"
    if conversation.label == "blocks":
        time.sleep(0.7)

async def ends_the_process(conversation):
    import os, psutil
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    os._exit(3)

async def best_of(groups):
    for group in groups:
        await group.sample(0)
        if group.label == "raises":
            {}["nothing"]
        group.leave_out(1)

async def best_of_short(groups):
    for group in groups:
        await group.sample(0)
        group.leave_out(1, "one is enough")

async def asks_twice(evaluation):
    for item in range(len(evaluation.prompts)):
        graded = await evaluation.sample(item)
        assert graded.reward is not None
        await evaluation.sample(item)
    {}["nothing"]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def samples(tmp_path: Path) -> str:
    path = tmp_path / "samples.jsonl"
    rows = [{"response": "4", "label": "4"}, {"response": "5", "label": "4", "prompt": "2+2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = try_function.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_grader_on_a_file(functions: str, samples: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "grader", f"{functions}:equal", "--on", samples)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == 'sample 0: label "4", response "4"'
    assert lines[1].startswith("  reward 1 in 0.")
    assert lines[3].startswith("  reward 0 in 0.")
    assert lines[4].startswith("2 samples in 0.")


def test_a_group_is_one_call(functions: str, samples: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "grader", f"{functions}:together", "--on", samples, "--group")
    assert code == 0
    assert "  reward 1 in 0." in text.splitlines()[3]


def test_a_grader_that_raises_shows_its_traceback_once(
    functions: str, samples: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "grader", f"{functions}:raises", "--on", samples)
    assert code == 1
    assert text.count("raised KeyError('nothing')") == 2
    assert text.count('    return {}["nothing"]') == 1


def test_a_grader_that_hangs_ends_with_its_limit(
    functions: str, samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ("--topology", "topologies/laptop.toml", "--set", "reward.timeout_s=0.5")
    code, text = said(capsys, "grader", f"{functions}:hangs", "--on", samples, "--limit", "1", *limit)
    assert code == 1
    assert "failed, timeout" in text


def test_metrics_on_a_dump(functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path, 0, [group(1, (1.0, 0.0), 0), group(2, (1.0, 1.0), 0)], (1, 0))
    code, text = said(capsys, "metrics", f"{functions}:of_set", "--on", str(tmp_path))
    assert (code, text.splitlines()[:2]) == (0, ["eval/<set>/mean 0.75", "eval/<set>/prompts 2"])
    code, text = said(capsys, "metrics", f"{functions}:of_sets", "--on", str(tmp_path))
    assert (code, text.startswith("eval.N.custom_metrics = "), "did you mean 'of_set'?" in text) == (2, True, True), (
        text
    )


def test_a_filter_on_a_dump(functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path, 0, [group(1, (1.0, 0.0), 0), group(2, (1.0, 1.0), 0)], (1, 0))
    code, text = said(capsys, "filter", "nonzero_std", "--on", str(tmp_path))
    first, second = text.splitlines()
    assert code == 0
    assert first.startswith("group 1: rewards 1, 0: keep; in the run ")
    assert second.startswith("group 2: rewards 1, 1: drop (zero_std_1.0); in the run ")
    code, text = said(capsys, "filter", f"{functions}:equal", "--on", str(tmp_path))  # reads what a group has not
    assert (code, text.count("failed (AttributeError")) == (1, 2)


def test_a_grader_reads_the_tokens_of_a_dump(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path, 0, [group(1, (1.0, 0.0), 0)], (1, 0))
    code, text = said(capsys, "grader", f"{functions}:of_tokens", "--on", str(tmp_path))
    assert (code, text.count("reward 1 (in the run ")) == (0, 2)


def test_a_source_that_returns_another_row_is_named(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "source", f"{functions}:numbers", "--limit", "2")
    assert (code, text.splitlines()[1].split(", ")[0]) == (0, 'row 1: {"input": "1"}')
    code, text = said(capsys, "source", f"{functions}:changes", "--limit", "1")
    assert code == 1
    assert "a second call returned another row" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("grader", "FILE:nothing", "--on", "SAMPLES"), "there is no 'nothing' in it"),
        (("grader", "FILE:equal"), "--on FILE or --on DUMP is needed"),
        (("filter", "nonzero_std", "--on", "SAMPLES"), "--on DUMP is needed"),
        (("grader", "FILE:equal", "--on", "SAMPLES", "--set", "a=1"), "--set needs --topology"),
        (("grader", "FILE:equal", "--on", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
    ],
)
def test_wrong_input(
    functions: str, samples: str, arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [word.replace("FILE:", f"{functions}:").replace("SAMPLES", samples) for word in arguments]
    code, text = said(capsys, *filled)
    assert (code, problem in text) == (2, True), text


def test_a_row_without_a_response_is_named(functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"response": "4"}\n{"answer": "4"}\n')
    code, text = said(capsys, "grader", f"{functions}:equal", "--on", str(tmp_path / "bad.jsonl"))
    assert (code, "bad.jsonl:2: expected an object with the text `response`" in text) == (2, True)


JUDGED = """
[reward]
graders = {{ same = "exact_match" }}
sums = {{ both = {{ same = 1.0, digits = 0.5 }} }}

[reward.judges.digits]
url = "{url}/v1"
model = "m"
template = "{{response}}"
api_key_env = "JUDGE_KEY"
max_tries = 1

[reward.judges.pooled]
template = "{{response}}"

[engines.judge]
kind = "tiny"
hf_checkpoint = "topologies/demo/models/reverse-digits"
"""


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(ScriptedJudge("so 8"))) as found:
        yield found


@pytest.fixture
def judged(judge: ScriptedJudge, samples: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    topology = tmp_path / "judged.toml"
    topology.write_text(f'include = "{Path("topologies/laptop.toml").resolve()}"\n{JUDGED.format(url=judge.url)}')
    return ("--on", samples, "--limit", "1", "--topology", str(topology))


def test_a_judge_behind_a_url_is_asked(
    judge: ScriptedJudge, judged: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "grader", "digits", *judged)
    assert (code, "  reward 8 in 0." in text, '{"judge_answer": "so 8"}' in text) == (0, True, True), text
    assert (judge.bodies[0]["messages"][0]["content"], judge.keys) == ("4", ["Bearer sk-1"])


def test_the_names_of_a_topology_are_graders(judged: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "grader", "both", *judged)
    assert (code, "  reward 5 in" in text) == (0, True), text  # 1 + 8 / 2
    code, text = said(capsys, "grader", "same", *judged)
    assert (code, "  reward 1 in" in text) == (0, True), text


def test_a_grader_calls_a_judge(judged: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "grader", f"{judging.__file__}:asks", *judged)
    assert (code, "  reward 0.296296 in" in text) == (0, True), text  # 8 of 27


def test_a_judge_of_a_pool_needs_engines_that_run(
    judge: ScriptedJudge, judged: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "grader", "pooled", *judged)
    assert (code, "the judge pooled has its engines in a run alone (engines.judge)" in text) == (2, True), text
    code, text = said(capsys, "grader", "pooled", *judged, "--set", f'engines.judge.urls=["{judge.url}"]')
    assert (code, "  reward 8 in" in text) == (0, True), text


def test_a_judge_that_fails_is_named(
    judge: ScriptedJudge, judged: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.script[:] = [(400, "too long")]
    code, text = said(capsys, "grader", "digits", *judged)
    assert (code, "  failed, refused: refused:" in text, "judge digits" in text) == (1, True, True), text
    judge.script[:] = ["I cannot say"]
    code, text = said(capsys, "grader", "digits", *judged)
    assert (code, "  failed, bad_answer: " in text) == (1, True), text
    monkeypatch.delenv("JUDGE_KEY")
    code, text = said(capsys, "grader", "digits", *judged)
    assert code == 2
    assert "reward.judges.digits.api_key_env = 'JUDGE_KEY': this variable is not set" in text


@pytest.mark.parametrize("kind", ["generate", "rollout", "evaluation"])
def test_a_file_without_a_prompt_is_refused(
    kind: str, functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    empty = str(tmp_path / "empty.jsonl")
    code, text = said(capsys, kind, f"{functions}:any", "--on", empty, "--topology", "topologies/laptop.toml")
    assert (code, "empty.jsonl: holds no prompt; expected a JSON object in each line" in text) == (2, True), text


def test_an_evaluation_needs_a_set_in_the_topology(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f'include = "{Path("topologies/laptop.toml").resolve()}"\neval = []\n')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "4"}\n')
    given = ("--on", str(tmp_path / "prompts.jsonl"), "--topology", str(own))
    code, text = said(capsys, "evaluation", f"{functions}:asks_twice", *given)
    assert (code, "own.toml: has no [[eval]] table; write one" in text) == (2, True), text


def test_a_generate_function_on_a_tiny_engine(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine for five prompts, on each of which the function does something else."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "<user>47<assistant>", "label": what} for what in ("decides", "raises", "fails", "text", "blocks")
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--on", str(prompts), "--topology", "topologies/laptop.toml", "--set", "rollout.max_response_len=8")
    code, text = said(capsys, "generate", f"{functions}:plays", *given)
    decides, raises, fails, as_text, blocks = text.split("prompt ")[1:]
    assert code == 1
    assert decides.startswith('0: "<user>47<assistant>"\n  conversation 0: ')
    assert "reward 0.5" in decides
    assert 'sample_metadata {"turns": 1}' in decides
    assert "  completed\n" in decides
    assert f"  failed: rollout.custom_generate: KeyError('nothing') ({functions}:" in raises
    assert '    {}["nothing"]' in raises
    assert "  failed: no such page\n" in fails
    assert "  failed: the reward 'reward' is '1', not a finite number\n" in as_text
    assert "it blocked the actor for 0." in blocks


def test_a_generate_function_gets_the_prompts_of_the_topology_without_a_file(
    functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    laptop = load_topology(Path("topologies/laptop.toml"), ()).topology
    given = ("--limit", "2", "--topology", "topologies/laptop.toml", "--set", "rollout.max_response_len=8")
    code, text = said(capsys, "generate", f"{functions}:plays", *given)
    assert code == 0, text
    for number, prompt in enumerate(first_prompts(laptop, 2)):
        assert f'prompt {number}: "{prompt.text}"\n' in text
    code, text = said(capsys, "generate", f"{functions}:plays", *given, "--set", "data=[]")
    assert (code, "has no [[data]] table" in text or "data" in text) == (2, True), text


def test_a_function_that_ends_the_process_leaves_no_engine(functions: str, tmp_path: Path) -> None:
    """Such as one that catches its cancellation for ever, which ends its process."""
    command = (sys.executable, "-P", "bin/physarum.py", "try", "generate", f"{functions}:ends_the_process")
    ended = subprocess.run(
        [*command, *on_prompts(tmp_path, "74")], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 3, ended.stderr
    engine = int(ended.stdout)
    assert wait_until_gone(engine, timeout_s=20)


def wait_until_gone(pid: int, *, timeout_s: float) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or bool(psutil.wait_procs([process], timeout=timeout_s)[0])
    return True


def on_prompts(tmp_path: Path, *labels: str, topology: str = "topologies/laptop.toml") -> tuple[str, ...]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "<user>47<assistant>", "label": label} for label in labels]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = ("rollout.max_response_len=8", "rollout.n_samples_per_prompt=2", "eval.0.n_samples_per_eval_prompt=2")
    given = ("--on", str(prompts), "--topology", topology)
    return (*given, *(part for each in sets for part in ("--set", each)))


def test_a_rollout_function_on_a_tiny_engine(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = on_prompts(tmp_path, "74", "raises")
    code, text = said(capsys, "rollout", f"{functions}:best_of", *given, "--set", "rollout.custom_rollout_prompts=2")
    first, second = text.split("prompt ")[1:]
    assert code == 1
    assert first.startswith('0: "<user>47<assistant>"\n  sample 0: ')
    assert ", reward 0" in first
    assert 'sample 1: "", 0 tokens, failed: rollout.custom_rollout left it out\n' in first
    assert "  failed: rollout.custom_rollout: KeyError('nothing')\n" in second
    assert '    {}["nothing"]' in second
    code, text = said(
        capsys, "rollout", f"{functions}:best_of_short", *given, "--set", "rollout.custom_rollout_prompts=2"
    )
    assert (code, text.count(": one is enough")) == (0, 2)
    code, text = said(capsys, "rollout", f"{functions}:best_off", *given)
    assert (code, "did you mean 'best_of'?" in text) == (2, True)


def test_an_evaluation_function_on_a_tiny_engine(
    functions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its grader is that of the data, as the set names none."""
    own = tmp_path / "own.toml"
    table = '[[eval]]\nname = "e"\npath = "e.jsonl"\ninterval = 1\n'
    own.write_text(f'include = "{Path("topologies/laptop.toml").resolve()}"\n{table}')
    given = on_prompts(tmp_path, "74", "1", topology=str(own))
    code, text = said(capsys, "evaluation", f"{functions}:asks_twice", *given)
    assert code == 1
    assert [prompt.count(", reward ") for prompt in text.split("prompt ")] == [0, 2, 2]
    assert "\nfailed: eval.0.custom_evaluation: KeyError('nothing')\n" in text


def test_a_class_as_source_draws_in_its_process_and_again_after_a_kill(
    functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, "source", f"{functions}:Doubles", "--limit", "2")
    assert code == 0
    assert 'row 1: {"input": "4"}, 1 bytes of state' in text
    assert "100 rows are the same after a kill" in text
    code, text = said(capsys, "source", f"{functions}:Sulks", "--limit", "1")
    assert code == 1
    assert "told(kept 0): raised ValueError: told so\nTraceback" in text  # on lines of its own
    code, text = said(capsys, "source", f"{functions}:Stops")
    assert (code, "row 0: " in text, "draw(1): raised ZeroDivisionError" in text) == (1, True, True)
    code, text = said(capsys, "source", f"{functions}:Forgets", "--limit", "1")
    assert code == 1
    assert "row 50 differs between two runs" in text


def test_a_function_with_a_process_of_its_own_is_called_on_lines_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def last(groups): return [groups[-1]]\ndef none(groups): return []\n")
    one = {"attempt": 1, "round": 0, "data": "d", "indices": [0], "rewards": [1.0], "response_lens": [3]}
    groups = [{**one, "group_id": number, "oldest_version": 1, "newest_version": 1} for number in (4, 7)]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"kind": "over_sampling_filter", "groups": groups, "count": 1}))
    for function, code, said in (("last", 0, '"group_ids": [7]'), ("none", 1, "returned 0 groups; at least 1 are")):
        assert try_function.main(["over_sampling_filter", f"{tmp_path}/mine.py:{function}", "--on", str(asked)]) == code
        assert said in capsys.readouterr().out
