"""What is said of a key that does not exist: slime's name for something, another table's key, a typo, or nothing."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.compat.slime.flags import Flag, from_slime
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.schema import find_problems
from runtime.settings.topology import Topology

LAPTOP = Path(__file__).resolve().parents[4] / "topologies/laptop.toml"
TABLES = ("", "run", "bus", "nodes.n1", "trainer", "trainer.megatron", "engines.judge", "data.1", "optimizer", "reward")
OTHERS = {  # settings with the name of a slime flag that means something else
    ("run", "load"),
    ("engines.judge", "hf_checkpoint"),
}
FLAGS = [(name, flag) for flag in from_slime().flags() for name in (flag.flag, *flag.also)]


def messages(table: str, names: Iterable[str]) -> dict[str, str]:
    """What the checker says of keys in one table of a file, by key."""
    value: Any = dict.fromkeys(names, 1)
    nothing: list[Any] = [{}]
    for part in reversed(table.split(".") if table else []):
        value = [*nothing * int(part), value] if part.isdigit() else {part: value}
    return {problem.key: problem.message for problem in find_problems(value, Topology)}


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str]]:
    """What the checker says of every spelling of every flag, by table and key."""
    names = [spelling for name, _ in FLAGS for spelling in spellings(name)]
    return {table: messages(table, names) for table in TABLES}


def overridden(key: str) -> str:
    """What the checker says of one key, by --set."""
    with pytest.raises(TopologyError) as caught:
        load_topology(LAPTOP, [f"{key}=1"])
    (problem,) = caught.value.problems
    return problem.message


def key_beside(flag: Flag, table: str) -> str | None:
    """A flag's key where it is written in one of the tables above."""
    for first, item in (("data.0.", "data.1."), ("engines.policy.", "engines.judge."), ("nodes.n0.", "nodes.n1.")):
        if flag.key is not None and flag.key.startswith(first) and f"{table}." == item:
            return flag.key.replace(first, item)
    return flag.key


def answer_of(flag: Flag, table: str) -> str:
    if flag.key is not None:
        return f"is {key_beside(flag, table)} here"
    return (
        f"has no key here: {plain(flag.no)}"
        if flag.no is not None
        else f"is not implemented yet: {plain(flag.not_yet)}"
    )


def plain(text: str | None) -> str:
    return (text or "").replace("`", "").partition("[")[0]


def spellings(name: str) -> Iterator[str]:
    yield from (name, f"--{name}", name.replace("-", "_"), f"--{name.replace('-', '_')}")


@pytest.mark.parametrize(("name", "flag"), FLAGS, ids=[name for name, _ in FLAGS])
def test_a_flag_of_slime_is_known_in_every_table_and_spelling(
    name: str, flag: Flag, told: dict[str, dict[str, str]]
) -> None:
    for table, said in told.items():
        for spelling in spellings(name):
            key = f"{table}.{spelling}" if table else spelling
            if (table, spelling) in OTHERS or key == key_beside(flag, table):
                continue  # a key that exists
            assert said[key].startswith(f"unknown key, slime's --{flag.flag} {answer_of(flag, table)}"), key
            assert "did you mean" not in said[key]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("rollout-batch-size", "slime's --rollout-batch-size is rollout.rollout_batch_size here (counts prompt"),
        ("algorithm.rollout_batch_size", "slime's --rollout-batch-size is rollout.rollout_batch_size here"),
        ("rollout.rollout_temperature", "slime's --rollout-temperature is rollout.temperature here (above 0)"),
        ("rollout.batch_size", "slime's --rollout-batch-size is rollout.rollout_batch_size here"),
        ("rollout.max-response-len", "slime's --rollout-max-response-len is rollout.max_response_len here"),
        ("rollout.function_path", "slime's --rollout-function-path is rollout.custom_rollout here ("),
        ("data.0.prompt_data", "slime's --prompt-data is data.0.path here"),
        ("eval.0.prompt_data", "slime's --eval-prompt-data is eval.0.path here"),
        ("eval.0.max_prompt_len", "slime's --eval-max-prompt-len is not implemented yet: the rollout's limit holds"),
        ("train.load", "slime's --load is trainer.load here (another run's directory, a checkpoint's, or"),
        ("run.--load", "slime's --load is trainer.load here (another run's directory, a checkpoint's, or"),
        ("rollout.--seed", "slime's --seed is run.seed here"),
        ("algorithm.rewards_normalization", "slime's --disable-rewards-normalization is algorithm.estimator.normalize"),
        ("trainer.no_offload_train", "slime's --offload-train has no key here: follows from engines.policy.colocate"),
        ("rollout.data_source_path", "slime's --data-source-path is data.0.source_class here (a class with other"),
        ("engines.policy.sglang_mem_fraction_static", "SGLang's --sglang-mem-fraction-static is engines.policy.sglang"),
        ("rollout.sglang-mem-fraction-static", "SGLang's --sglang-mem-fraction-static is engines.policy.sglang.mem"),
        ("engines.policy.sglang_router_policy", "slime's --sglang-router-policy is engines.policy.router_policy here"),
        ("engines.policy.router_cache_threshold", "sglang-router's --router-cache-threshold is not implemented yet"),
        ("engines.policy.sglang_router_ip", "slime's --sglang-router-ip is engines.policy.router_url here (http://IP:PO"),
        ("trainer.tensor_model_parallel_size", "did you mean trainer.megatron.tensor_model_parallel_size?"),
        ("trainer.--tensor-model-parallel-size", "did you mean trainer.megatron.tensor_model_parallel_size?"),
        ("trainer.megatron.num_layers", "Megatron-core's num_layers has no key here: read from the model's con"),
        ("model.bf16", 'Megatron\'s --bf16 is model.dtype here ("bfloat16")'),
        ("trainer.moe_router_topk", "Megatron's --moe-router-topk has no key here: read from the model's config.json"),
        ("algorithm.weight_decay", "did you mean optimizer.weight_decay or critic.weight_decay?"),
        ("teacher_port", "slime's teacher server's --teacher-port has no key here: engines of SGLang"),
    ],
)  # fmt: skip
def test_what_is_said_by_set(key: str, said: str) -> None:
    assert overridden(key).startswith(f"unknown key, {said}")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "algorithm.temperature",
            "did you mean rollout.temperature or eval.0.temperature or reward.judges.<name>.temperature?",
        ),
        ("megatron", "did you mean trainer.megatron?"),
        ("rollout.gpus", "did you mean nodes.<name>.gpus or trainer.gpus or engines.<name>.gpus?"),
        ("engines.judge.gpu", "did you mean gpus?"),
        ("rollout.max_response_length", "verl's max_response_length is rollout.max_response_len here"),
        ("rollout.max_response_lenn", "did you mean max_response_len?"),
        ("rollout.Temperature", "did you mean temperature?"),
        ("rollout.maxresponselen", "did you mean max_response_len?"),
        ("optimizer.weigth_decay", "did you mean weight_decay?"),
    ],
)
def test_a_key_of_another_table_and_a_typo_are_recognised(key: str, said: str) -> None:
    assert overridden(key).startswith(f"unknown key, {said}")


@pytest.mark.parametrize(
    "key",
    [
        "rollout.min_prompt_len",
        "algorithm.entropy_coef_start",
        "algorithm.eps_clip_low",
        "rollout.timeout_s2",
        "engines.policy.moe_a2a_backend",  # an argument of SGLang: no flag of Megatron's goes there
        "engines.policy.fp8_gemm_backend",
        "trainer.ranks",
    ],
)
def test_nothing_is_guessed_where_a_word_differs(key: str) -> None:
    assert overridden(key).startswith("unknown key; allowed: ")


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (
            {"engines": {"rollout_num_gpus": 8}},
            "expected a table; slime's --rollout-num-gpus is engines.policy.gpus here",
        ),
        ({"nodes": {"num-gpus-per-node": 8}}, "expected a table; slime's --num-gpus-per-node is nodes.n0.gpus here"),
        ({"optimizer": "adam"}, "expected a table; Megatron's --optimizer is not implemented yet: AdamW on the device"),
        ({"rollout": 3}, "expected a table"),
    ],
)
def test_a_flag_where_a_table_belongs_is_recognised(tables: dict[str, Any], line: str) -> None:
    said = [problem.message for problem in find_problems(tables, Topology) if problem.value is not None]
    (message,) = said
    assert message.startswith(line)


def test_a_file_of_slimes_flags_is_answered_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "from-slime.toml"
    path.write_text(
        f'include = "{LAPTOP}"\n--n-samples-per-prompt = 8\n[algorithm]\nuse-rollout-entropy = true\n'
        '[reward]\nhttp-proxy = "http://x"\n'
    )
    with pytest.raises(TopologyError) as caught:
        load_topology(path)
    lines = [str(problem).partition("; allowed")[0] for problem in caught.value.problems]
    says = "unknown key, slime's"
    assert sorted(lines) == [
        f"{path}: --n-samples-per-prompt: {says} --n-samples-per-prompt is rollout.n_samples_per_prompt here "
        "(1 with reward normalisation is refused: every reward would become 0)",
        f"{path}: algorithm.use-rollout-entropy: {says} --use-rollout-entropy is not implemented yet: "
        "entropy is a metric of the train step, not a column of samples",
        f"{path}: reward.http-proxy: {says} --http-proxy has no key here: rollout actors reach their engines directly",
    ]
