"""`--check` runs users' code in a process that it can end, and names what it waited for or what ended that process."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import actors.preflight  # noqa: F401 - here once, not in the process of each check
from actors.buffer.preflight import PROBE
from bin.start_topology import main
from tests.bin.check_cases import LAPTOP, MODEL, ROOT

USERS = """
import os, sys

def nothing(number): return None
def raising(number): raise KeyError("x")
def odd(number): return {"input": "12", "label": float("nan")}
def exiting(number): sys.exit(3)
def ending(number): os._exit(3)
def waiting(number):
    import time
    time.sleep(600)
def foreign(number): return {"prompt_ids": [99], "label": "1"}
async def asynchronous(sample): yield 1.0
def generator(sample): yield 1.0
def careless(sample): return 1.0 / len(sample.response)
def online(sample):
    import socket
    socket.create_connection(("127.0.0.1", 9), timeout=2)
def sleeping(sample):
    import time
    time.sleep(60)
def loud(sample): print("LOUD" * 30_000); return 1.0
def forgetful(sample): sample.response == sample.label
class Levels:
    def draw(self, number): raise KeyError(number)
    def state(self): return 0
    def restore(self, state): pass
"""


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A folder with files that are not as they should be."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "asks.py").write_text("input()\n")
    os.mkfifo(tmp_path / "fifo")
    late = [{"input": "12" if number != 1100 else "é", "label": "21"} for number in range(1200)]
    (tmp_path / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    for name, label in {"list": ["21"], "object": {"a": 1}, "bool": True}.items():
        rows = [{"input": "12", "label": "21"}, {"input": "12", "label": label}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = "{% for i in range(99999) %}"
    is_row = f"{{% if messages[0]['content'] != '{PROBE}' %}}"  # the check renders a message before the rows
    endless = f"{is_row}{loop * 3}{'{% endfor %}' * 3}{{% endif %}}"
    changes = {"loops/tokenizer_config.json": {"chat_template": endless}, "huge/config.json": {"hidden_size": 2**22}}
    changes |= {"wide/config.json": {"hidden_size": 2**20}}
    for name, change in changes.items():
        file = tmp_path / name
        shutil.copytree(MODEL, file.parent)
        file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    return tmp_path


def check(users: Path, *changes: str, limit_s: float = 2) -> int:
    words = ["rollout.shuffle=false", "eval=[]", f"run.dir={users}", f"run.check_timeout_s={limit_s}", *changes]
    words = [word.replace("TMP", str(users)) for word in words]
    options = [word for word in words if word.startswith("--")]
    return main([str(LAPTOP), "--check", *options, *(f"--set={word}" for word in words if word not in options)])


def source(name: str) -> str:
    return f'data=[{{name="d",source="TMP/users.py:{name}",label_key="label",rm_type="positional_match"}}]'


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ("optimizer.lr=inf", "optimizer.lr = inf", "is not finite"),
        ("optimizer.weight_decay=nan", "optimizer.weight_decay = nan", "is not finite"),
        (source("nothing"), "data.0.source", "expected a dict of JSON values"),
        (source("raising"), "data.0.source", "raised KeyError: 'x'"),
        (source("odd"), "data.0.source", "expected a dict of JSON values: Out of range float"),
        (source("exiting"), "data.0.source", "raised SystemExit: 3"),
        (
            source("Levels").replace("source=", "source_class="),
            "data.0.source_class",
            'users.py:Levels": draw(0): raised KeyError: 0',  # the class once
        ),
        (source("ending"), "data.0.source", "its process exited with code 3, 3 times"),
        (source("foreign"), "model.hf_checkpoint", "token 99"),
        ("data.0.path=TMP/late.jsonl", "data.0.path", "late.jsonl:1101: cannot be tokenised"),
        ("data.0.path=TMP/list.jsonl", "data.0.label_key", "row 1 of"),
        ("data.0.path=TMP/object.jsonl", "data.0.label_key", "the label must be text or a number, not dict"),
        ("data.0.path=TMP/bool.jsonl", "data.0.label_key", "the label must be text or a number, not bool"),
        ("data.0.path=TMP/fifo", "data.0.path", "not a regular file"),
        ("data.0.path=/dev/zero", "data.0.path", "not a regular file"),
        ("data.0.rm_type=TMP/users.py:asynchronous", "data.0.rm_type", "asynchronous is a generator"),
        ("data.0.rm_type=TMP/users.py:generator", "data.0.rm_type", "generator is a generator"),
        ("data.0.rm_type=TMP/ends.py:f", "data.0.rm_type", "importing it ended the process: it exited with code 4"),
        ("data.0.rm_type=TMP/asks.py:f", "data.0.rm_type", "importing it failed: EOFError"),
        (
            "data.0.rm_type=TMP/users.py:forgetful",
            "data.0.rm_type",
            "returned None, not a number (TMP/users.py:23, in forgetful)",
        ),
        ("model.hf_checkpoint=TMP/huge", "model.hf_checkpoint", "of memory in 1 replica"),
        ("model.hf_checkpoint=TMP/wide", "model.hf_checkpoint", "hidden_size = 1048576: at most 131072"),
        ("train.num_steps=0", "train.num_steps = 0", "the run has no length"),
    ],
)
def test_what_would_end_a_start_is_refused(
    change: str, key: str, words: str, users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(users, change, limit_s=60) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    words = words.replace("TMP", str(users))
    assert any(f": {key}" in line and words in line for line in lines), lines


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("data.0.rm_type=TMP/hangs.py:f", "importing it"),
        ("rollout.dynamic_filter=TMP/hangs.py:f", "importing it"),
        (source("waiting"), "calling it for its first rows"),
        ("model.hf_checkpoint=TMP/loops", "rendering and tokenising its rows from 0 on"),
    ],
)
def test_what_would_hang_is_ended_and_named(
    change: str, what: str, users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(users, change) == 2
    assert f"{what} did not end within 2 s (run.check_timeout_s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("careless", "with an empty answer: raised ZeroDivisionError"),
        ("online", "with an empty answer: raised ConnectionRefusedError"),
        ("sleeping", "with an empty answer: no grade within 1 s (reward.timeout_s)"),
    ],
)
def test_a_grader_that_fails_on_an_empty_answer_is_a_note(
    function: str, words: str, users: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(users, f"data.0.rm_type=TMP/users.py:{function}", "reward.timeout_s=1", limit_s=60) == 0
    assert words in capsys.readouterr().err


def test_strict_refuses_what_is_a_note_otherwise(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(users, "data.0.rm_type=TMP/users.py:careless", "--strict", limit_s=60) == 2
    assert "raised ZeroDivisionError('float division by zero') (" in capsys.readouterr().err
    assert main([str(LAPTOP), "--strict"]) == 2
    assert "--strict needs --check" in capsys.readouterr().err


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", str(ROOT / "bin/physarum.py"), "start-topology", *words]


def test_what_a_grader_prints_is_in_a_file_and_one_line_names_it(users: Path) -> None:
    words = [str(LAPTOP), "--check", "--set", f"data.0.rm_type={users}/users.py:loud", "--set", f"run.dir={users}"]
    env = {**os.environ, "TMPDIR": str(users)}
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, f"{LAPTOP}: valid; the run can start on this machine\n")
    (note,) = done.stderr.splitlines()
    printed = Path(note.rpartition(": ")[2])
    assert note.startswith("note: the checks and your functions printed ")
    assert "LOUD" in printed.read_text()
    assert printed.parent == users


@pytest.mark.parametrize("name", ["torch", "anyio", "argparse"])
def test_a_file_on_the_path_that_takes_the_place_of_a_module_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").touch()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command(str(LAPTOP), "--check"), capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"PYTHONPATH: {tmp_path}/{name}.py takes the place of {name}; ")
    assert len(done.stderr.splitlines()) == 1


def test_too_few_open_files_are_refused_with_the_number_that_is_needed(tmp_path: Path) -> None:
    done = subprocess.run(
        command(str(LAPTOP), "--check", "--set", f"run.dir={tmp_path}"),
        capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
    )  # fmt: skip
    assert done.returncode == 2
    assert "a process may have 40 files open here (ulimit -n), and this run needs 200" in done.stderr


@pytest.mark.parametrize("name", ["fifo", "/dev/zero"])
def test_a_topology_that_is_no_file_is_refused(name: str, users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(users / name), "--check"]) == 2
    assert "is not a regular file" in capsys.readouterr().err
