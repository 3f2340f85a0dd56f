"""bin/replay on a dump of a few groups: called in this process, and once as a person calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bin.replay import main
from runtime.data.dump_files import write_pair
from runtime.data.dumps import DumpedGroup
from tests.runtime.data.test_dumps import example
from tests.support.commands import called

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "bin" / "physarum.py"
SMALL = ("--set", "rollout.n_samples_per_prompt=2", "--set", "rollout.rollout_batch_size=2")


def replay(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return called(main, *arguments, cwd=cwd)


def started(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command as a process."""
    command = [sys.executable, str(COMMAND), "replay", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def group(group_id: int, rewards: tuple[float, float], step: int | None) -> DumpedGroup:
    samples = [
        msgspec.structs.replace(sample, reward=reward)
        for sample, reward in zip(example(group_id, step=step).samples, rewards, strict=True)
    ]
    return msgspec.structs.replace(example(group_id, step=step), samples=tuple(samples))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Six groups of two samples in three batches; groups 1 and 4 have equal rewards."""
    rewards = {0: (0.0, 1.0), 1: (1.0, 1.0), 2: (0.0, 0.5), 3: (0.0, 1.0), 4: (0.0, 0.0), 5: (0.25, 0.5)}
    for step in range(3):
        ids = (2 * step, 2 * step + 1)
        write_pair(tmp_path, step, [group(group_id, rewards[group_id], step) for group_id in ids], (step + 1, 0))
    topology = {**_topology(), "run": {"name": "dumped", "dump_details": str(tmp_path)}}
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    return tmp_path


def _topology() -> dict[str, Any]:
    return {
        "model": {
            "hf_checkpoint": str(ROOT / "topologies/demo/models/reverse-digits"),
            "random_init": True,
            "ref_load": None,
        },
        "data": [{"name": "d", "path": "none.jsonl", "rm_type": "exact_match"}],
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 8},
        "train": {"num_steps": 3},
        "trainer": {"device": "cpu"},
        "engines": {"policy": {"kind": "tiny"}},
    }


def test_the_filter_is_asked_again_with_other_settings(dump: Path) -> None:
    done = replay(dump, "--to", "filter", "--set", "rollout.dynamic_filter=nonzero_std", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["filter"], told["groups"], told["verdicts"]) == ("nonzero_std", 6, {"keep": 4, "drop": 2})
    assert sorted((row["reason"], row["groups"]) for row in told["reasons"]) == [
        ("zero_std_0.0", 1),
        ("zero_std_1.0", 1),
    ]
    assert told["changed"] == [{"group_id": group_id, "was": "keep", "is": "drop"} for group_id in (1, 4)]


def test_the_filter_is_told_for_people(dump: Path) -> None:
    done = replay(dump, "--to", "filter")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"filter none: 6 groups of {dump}",
        "  keep         6",
        "  changed since the dump: 0",
    ]


def test_a_filter_of_ones_own_may_be_async_and_may_raise(dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "async def judge(group):\n"
        "    if group.group_id == 3:\n"
        "        raise KeyError('three')\n"
        "    return group.group_id < 5, 'late'\n"
    )
    done = started(dump, "--to", "filter", "--set", f"rollout.dynamic_filter={file}:judge", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["verdicts"] == {"keep": 4, "drop": 1, "failed": 1}
    assert {row["reason"] for row in told["reasons"]} == {"late", "KeyError('three')"}


def test_batches_are_those_of_the_dump_with_the_same_settings(dump: Path) -> None:
    done = replay(dump, "--to", "batch", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["groups"] for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert rows[0]["reward_mean"] == 0.75
    assert rows[0]["reward_std"] == pytest.approx(0.4330127)


def test_batches_follow_other_settings(dump: Path) -> None:
    chosen = ("--set", "rollout.over_sampling_batch_size=3", "--set", "rollout.over_sampling_filter=sort_by_reward_std")
    rows = [json.loads(line) for line in replay(dump, "--to", "batch", *chosen, "--json").stdout.splitlines()]
    assert [row["groups"] for row in rows] == [[0, 2], [3, 5]]  # of 0, 1, 2 and of 3, 4, 5 those that differ most
    kept = replay(dump, "--to", "batch", "--set", "rollout.dynamic_filter=nonzero_std")
    assert kept.stdout.splitlines() == [
        "step 1: reward 0.375, std 0.415, 2 groups: 0, 2",
        "step 2: reward 0.438, std 0.370, 2 groups: 3, 5",
        "4 of 6 groups in 2 batches",
        "  dropped 1: zero_std_0.0",
        "  dropped 1: zero_std_1.0",
    ]


def test_a_topology_file_may_be_named(dump: Path) -> None:
    laptop = ROOT / "topologies" / "laptop.toml"
    done = replay(dump, laptop, "--to", "batch", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_the_trainer_is_given_the_dump_under_a_name_of_its_own(dump: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"input": "47"}\n')
    model = f"model.hf_checkpoint={ROOT / 'topologies/demo/models/reverse-digits'}"
    chosen = ("--set", f"data.0.path={data}", "--set", model, "--set", "train.num_steps=9")
    chosen += ("--set", "trainer.device=cpu")  # how it runs is not taken of the dump
    done = replay(dump, "--to", "trainer", "--plan", *chosen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("run dumped-replay in ")
    assert "3 steps of 2 groups x 2 samples" in done.stdout
    assert f"samples  from the dump in {dump}, no engines" in done.stdout
    assert not {"engine", "router", "reward"} & {line.split()[0].partition(".")[0] for line in done.stdout.splitlines()}


def test_a_missing_dump_and_a_broken_one_are_named(dump: Path, tmp_path: Path) -> None:
    done = replay(tmp_path / "nowhere", "--to", "filter")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path / 'nowhere'}: no such directory\n"
    with (dump / "rollout_1.jsonl").open("a") as file:
        file.write('{"group_id": ')
    done = replay(dump, "--to", "batch")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{dump / 'rollout_1.jsonl'}:5: ")


def test_wrong_settings_are_wrong_input(dump: Path) -> None:
    done = replay(dump, "--to", "filter", "--set", "rollout.dynamic_filter=nonzero")
    assert done.returncode == 2
    assert '--set: rollout.dynamic_filter = "nonzero": ' in done.stderr
    assert "did you mean 'nonzero_std'?" in done.stderr
    assert replay(dump, "--to", "filter", "--set", "rollout.dynamic=1").returncode == 2
    assert replay(dump, "--to", "nobody").returncode == 2
    assert replay(dump, "--to", "filter", "--plan").returncode == 2


def with_code_of_a_stranger(dump: Path, **changes: Any) -> Path:
    """Has a dump name a function that leaves a mark when it is imported; returns where the mark would be."""
    mark = dump / "was-imported"
    (dump / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef f(*args):\n    return True\n")
    topology = json.loads((dump / "topology.json").read_text())
    for table, values in changes.items():
        topology.setdefault(table, {}).update(values)
    (dump / "topology.json").write_text(json.dumps(topology))
    return mark


def left_out(dump: Path, *named: str) -> str:
    what = "; ".join(named)
    return f"{dump / 'topology.json'} may be a stranger's: left out are {what}"


def test_code_that_only_a_dump_names_is_left_out(dump: Path) -> None:
    places = "places to read (model.hf_checkpoint, data.0.path)"
    own = "places to write (run.dump_details)"
    mark = with_code_of_a_stranger(dump, rollout={"dynamic_filter": "evil.py:f", "buffer_filter": "evil.py:f"})
    functions = "functions (rollout.dynamic_filter, rollout.buffer_filter)"
    running = "how the run runs (trainer.device, engines.policy.kind)"
    for target in ("filter", "batch"):
        done = replay(dump, "--to", target)
        assert (done.returncode, mark.exists()) == (0, False)
        assert done.stderr == f"{left_out(dump, places, functions, running, own)}; --trust takes them\n"
    mark = with_code_of_a_stranger(dump, reward={"graders": {"own": "evil.py:f"}}, model={"trust_remote_code": True})
    model = ROOT / "topologies/demo/models/reverse-digits"
    (dump / "d.jsonl").write_text('{"input": "47", "label": "74"}\n')
    chosen = [f"model.hf_checkpoint={model}", f"data.0.path={dump / 'd.jsonl'}", "data.0.label_key=label"]
    chosen.append("trainer.device=cpu")
    chosen = [word for item in chosen for word in ("--set", item)]
    done = replay(dump, "--to", "trainer", "--check", *chosen)
    assert (done.returncode, mark.exists()) == (0, False), done.stderr
    code = "what code gets or may do (model.trust_remote_code)"
    functions = "functions (rollout.dynamic_filter, rollout.buffer_filter, reward.graders.own)"
    assert done.stderr.startswith(left_out(dump, code, functions))
    done = replay(dump, "--to", "trainer", "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "topology.json: model.hf_checkpoint: missing" in done.stderr


def test_code_of_a_dump_is_imported_where_the_user_says_so(dump: Path) -> None:
    mark = with_code_of_a_stranger(dump, rollout={"dynamic_filter": "evil.py:f"})
    done = replay(dump, "--to", "filter", "--trust")
    assert (done.returncode, mark.exists()) == (0, True)
    assert done.stderr.startswith(f"--trust: {dump / 'topology.json'} names places to read (model.hf_checkpoint = ")
    assert 'functions (rollout.dynamic_filter = "evil.py:f")' in done.stderr
    mark.unlink()
    done = replay(dump, "--to", "filter", "--set", f"rollout.dynamic_filter={dump / 'evil.py'}:f")
    assert (done.returncode, mark.exists()) == (0, True)
    mark.unlink()
    (dump.parent / "own.json").write_text((dump / "topology.json").read_text())  # a TOPOLOGY that the user names
    done = replay(dump, dump.parent / "own.json", "--to", "filter", "--set", f"rollout.dynamic_filter={dump}/evil.py:f")
    assert (done.returncode, done.stderr, mark.exists()) == (0, "", True)
    mark.unlink()
    done = replay(dump, dump / "topology.json", "--to", "filter")  # which names the dump's own all the same
    assert (done.returncode, mark.exists()) == (0, False)


def test_a_dump_below_run_dir_that_is_the_users_needs_no_trust(dump: Path, tmp_path: Path) -> None:
    mark = with_code_of_a_stranger(dump, rollout={"dynamic_filter": "evil.py:f"})
    home = tmp_path / "home"
    (home / "runs" / "mine").mkdir(parents=True)
    own = home / "runs" / "mine" / "dump"
    own.mkdir()
    for file in dump.glob("*.*"):
        (own / file.name).write_bytes(file.read_bytes())
    done = replay(own, "--to", "filter", cwd=home)
    assert (done.returncode, done.stderr, mark.exists()) == (0, "", True)
    mark.unlink()
    elsewhere = replay(own, "--to", "filter", "--set", f"run.dir={tmp_path / 'others'}", cwd=home)
    assert "may be a stranger's" in elsewhere.stderr
    (home / "runs" / "link").symlink_to(dump)
    assert "may be a stranger's" in replay(home / "runs" / "link", "--to", "filter", cwd=home).stderr
    (own / "topology.json").chmod(0o666)  # anybody may have written it
    assert "may be a stranger's" in replay(own, "--to", "filter", cwd=home).stderr
    assert not mark.exists()


@pytest.mark.parametrize("name", ["rollout_1.jsonl", "rollout_1.npz"])
def test_a_dump_opens_no_file_outside_of_it(dump: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside-{name}"
    (dump / name).rename(outside)
    (dump / name).symlink_to(outside)
    done = replay(dump, "--to", "batch")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{dump / name}: '{name}' leads out of {dump}" in done.stderr
    (dump / name).unlink()
    os.mkfifo(dump / name)
    assert replay(dump, "--to", "batch").stderr.endswith(f"{dump / name}: is not a regular file\n")


def test_help_loads_no_bus() -> None:
    command = [sys.executable, "-X", "importtime", str(COMMAND), "replay", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"nats", "msgspec", "anyio", "numpy"}
