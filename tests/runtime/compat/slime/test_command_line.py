"""A flag of slime on the command line is answered with what it is here, and so is a grader's name."""

from pathlib import Path

import pytest

from actors.reward.graders.builtin import BUILT_IN_GRADERS
from bin.start_topology import main
from runtime.compat.slime.flags import from_slime
from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.reading.schema import type_at
from runtime.settings.topology import Topology


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rollout-batch-size", "32"], "slime's --rollout-batch-size is rollout.rollout_batch_size here"),
        (["--colocate", "--lr=1e-6"], "--lr: slime's --lr is optimizer.lr here"),
        (["--sglang-mem-fraction-static", "0.7"], "SGLang's --sglang-mem-fraction-static is engines.policy.sglang."),
        (["--train-env-vars", "{}"], "has no key here: processes inherit the environment"),
    ],
)
def test_a_flag_of_slimes_is_answered_with_what_became_of_it(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["laptop", *words, "--check"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"unrecognized arguments: {' '.join(words)}\n" in shown
    assert told in shown
    assert shown.endswith("Set keys in the topology file, or override one with --set KEY=VALUE.\n")


def test_graders_of_slime_that_are_built_have_its_names() -> None:
    for grader in from_slime().graders:
        assert (grader.name in BUILT_IN_GRADERS) == (grader.state == "key")


def test_a_flag_of_slime_goes_before_the_field_of_megatron_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"is optimizer\.lr here"):
        type_at(Topology, ["trainer", "optimizer", "lr"])


def test_a_function_of_slime_needs_whole_sequences() -> None:
    function = 'algorithm.tis={type="custom", function="slime:m:f"}'
    with pytest.raises(TopologyError, match="is a function of slime, which gets whole sequences"):
        load_topology(Path("laptop"), (function, "trainer.megatron.context_parallel_size=2"))
