"""What a start refuses of a teacher's model: another tokenizer, a short context, a missing file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.reward.preflight import check_keys
from actors.rollout.preflight import check_agent, check_frozen_pools, check_judges, memory_of_pools
from runtime.settings.load import load_topology
from runtime.settings.reading.config import Problem
from runtime.settings.tables.algorithm import ForwardKl, SglangTeacher
from runtime.settings.topology import Topology
from tests.runtime.settings.shipped import LAPTOP
from tests.support.checks import problems_of
from tests.support.distilling import write_teacher


def with_teacher(directory: Path, **pool: Any) -> Topology:
    overrides = (
        "algorithm.opd.type=sglang",
        f'engines.teacher={{kind = "tiny", hf_checkpoint = "{directory}"}}',
    )
    topology = load_topology(LAPTOP, overrides).topology
    teacher = msgspec.structs.replace(topology.engines["teacher"], **pool)
    return msgspec.structs.replace(topology, engines=topology.engines | {"teacher": teacher})


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def swap_tokens(tokenizer: dict[str, Any]) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.json", swap_tokens, "its tokenizer.json is another one: '"),
        ("config.json", lambda config: config.update(vocab_size=5), "its vocabulary has 5 tokens, and the tokenizer"),
        ("config.json", lambda config: config.update(max_position_embeddings=20), "its context has 20 tokens; samples"),
        ("config.json", lambda config: config.pop("vocab_size"), "vocab_size is missing"),
    ],
)
def test_a_teacher_that_cannot_read_the_samples_is_refused(
    file: str, change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    topology = with_teacher(teacher)
    assert problems_of(topology, check_frozen_pools) == []
    edited(teacher / file, change)
    (problem,) = problems_of(topology, check_frozen_pools)
    assert problem.key == "engines.teacher.hf_checkpoint"
    assert message in problem.message
    assert problems_of(topology, check_frozen_pools, broken=(problem,)) == []


def test_external_engines_need_neither_weights_nor_a_model_that_the_tiny_engine_reads(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    edited(teacher / "config.json", lambda config: config.update(model_type="another", architectures=["Another"]))
    assert problems_of(with_teacher(teacher), check_frozen_pools)
    assert problems_of(with_teacher(teacher, urls=("http://h:1",)), check_frozen_pools) == []


def test_the_memory_of_a_teacher_is_that_of_its_files_in_each_engine(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher")
    size = (teacher / "model.safetensors").stat().st_size
    assert memory_of_pools(with_teacher(teacher, num_engines=3)) == 3 * 2 * size
    assert memory_of_pools(with_teacher(teacher, urls=("http://h:1",))) == 0


def with_judge(directory: Path, *overrides: str) -> Topology:
    judge = (
        "reward.judges.j={template = '{response}'}",
        f'engines.judge={{kind = "tiny", hf_checkpoint = "{directory}"}}',
    )
    return load_topology(LAPTOP, (*judge, *overrides)).topology


def test_a_judge_may_have_another_tokenizer_and_needs_a_chat_template(tmp_path: Path) -> None:
    judge = write_teacher(tmp_path / "judge")
    edited(judge / "tokenizer.json", swap_tokens)
    topology = with_judge(judge)
    assert problems_of(topology, check_frozen_pools) == []
    assert problems_of(topology, check_judges) == []
    assert memory_of_pools(topology) == memory_of_pools(with_teacher(write_teacher(tmp_path / "teacher")))
    edited(judge / "tokenizer_config.json", lambda config: config.pop("chat_template"))
    (problem,) = problems_of(topology, check_judges)
    assert (problem.key, problem.value) == ("engines.judge.hf_checkpoint", f'"{judge}"')
    assert problem.message.startswith("has no chat template, which a judge needs")
    assert problems_of(topology, check_judges, broken=(problem,)) == []
    (judge / "chat_template.jinja").write_text("x")
    assert problems_of(topology, check_judges) == []


def test_the_key_of_a_judge_is_read_on_the_nodes_of_reward_actors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_url = "reward.judges.j={url = 'http://h/v1', model = 'm', "
    named = load_topology(LAPTOP, (at_url + "api_key_env = 'JUDGE_KEY'}",)).topology
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (problem,) = problems_of(named, check_keys)
    assert str(problem) == 'reward.judges.j.api_key_env = "JUDGE_KEY": this variable is not set on this node, or empty'
    assert problems_of(named, check_keys, node="other") == []
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    assert problems_of(named, check_keys) == []

    file = tmp_path / "key"
    kept = load_topology(LAPTOP, (at_url + f"api_key_file = '{file}'}}",)).topology
    messages: list[str] = []
    for content, mode in ((None, 0), ("sk-2", 0o644), ("two words", 0o600), ("sk-2\n", 0o600)):
        if content is not None:
            file.write_text(content)
            file.chmod(mode)
        messages += [problem.message for problem in problems_of(kept, check_keys)]
    assert ["No such file" in messages[0], "chmod 600" in messages[1], "the key alone" in messages[2]] == [True] * 3
    assert len(messages) == 3
    assert not any("sk-2" in message for message in messages)


def test_more_likeliest_tokens_than_the_vocabulary_has_are_refused(tmp_path: Path) -> None:
    topology = with_teacher(write_teacher(tmp_path / "teacher"))
    size = json.loads((tmp_path / "teacher/config.json").read_text())["vocab_size"]
    for width, is_refused in ((size, False), (size + 1, True)):
        opd = SglangTeacher(kl_coef=0.0, distillation=ForwardKl(coef=1.0, topk=width))
        algorithm = msgspec.structs.replace(topology.algorithm, opd=opd)
        found = problems_of(msgspec.structs.replace(topology, algorithm=algorithm), check_frozen_pools)
        assert [problem.key for problem in found] == ["algorithm.opd.distillation.topk"] * is_refused
        assert not found or f"has {size} tokens" in found[0].message


def test_a_program_that_is_not_on_this_machine_is_named(tmp_path: Path) -> None:
    program = tmp_path / "agent"
    prompts = ("data.0.apply_chat_template=false",)

    def found(command: str) -> list[Problem]:
        table = f"rollout.agent={{command = ['{command}', 'x'], sandbox = 'process'}}"
        return problems_of(load_topology(LAPTOP, (table, *prompts)).topology, check_agent)

    assert [problem.key for problem in found("no-such-program")] == ["rollout.agent.command"]
    assert "is no program on this machine" in found(str(program))[0].message
    program.write_text("#!/bin/sh")
    assert found(str(program))  # it cannot be executed
    program.chmod(0o755)
    assert found(str(program)) == found("sh") == []


def test_a_machine_that_cannot_isolate_programs_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.functions.isolation.refusal", lambda: "unshare: Operation not permitted")
    settings = ("rollout.agent.command=['sh']", "data.0.apply_chat_template=false")
    (problem,) = problems_of(load_topology(LAPTOP, settings).topology, check_agent)
    assert (problem.key, problem.value) == ("rollout.agent.sandbox", '"isolated"')
    assert "this machine cannot isolate programs: unshare: Operation not permitted" in str(problem)
    by_hand = load_topology(LAPTOP, (*settings, "rollout.agent.sandbox=none")).topology
    assert problems_of(by_hand, check_agent) == []
