"""Tables with a `type`: another type replaces the table, in files and with --set; and what is said of wrong ones."""

from pathlib import Path

import pytest

from runtime.settings.load import load_topology
from runtime.settings.reading.config import TopologyError
from runtime.settings.tables.algorithm import (
    AlgorithmConfig,
    ForwardKl,
    LinearPenalty,
    MixedKl,
    SglangTeacher,
    TruncateTis,
)
from runtime.settings.tables.losses import GspoLoss, PpoLoss
from tests.runtime.settings.shipped import LAPTOP


def overlaid(tmp_path: Path, text: str, *overrides: str) -> AlgorithmConfig:
    """The algorithm of the laptop's topology under another file."""
    file = tmp_path / "mine.toml"
    file.write_text(f'include = "laptop.toml"\n{text}\n')
    return load_topology(file, overrides).topology.algorithm


def test_a_later_file_with_another_type_replaces_the_table(tmp_path: Path) -> None:
    assert overlaid(tmp_path, "").loss == PpoLoss(eps_clip_high=0.28)
    assert overlaid(tmp_path, '[algorithm.loss]\ntype = "gspo"').loss == GspoLoss()
    assert overlaid(tmp_path, '[algorithm.loss]\ntype = "gspo"\neps_clip = 3e-4').loss == GspoLoss(eps_clip=3e-4)


def test_a_later_file_with_the_same_type_or_none_is_merged(tmp_path: Path) -> None:
    expected = PpoLoss(eps_clip=0.1, eps_clip_high=0.28)
    assert overlaid(tmp_path, '[algorithm.loss]\ntype = "ppo"\neps_clip = 0.1').loss == expected
    assert overlaid(tmp_path, "[algorithm.loss]\neps_clip = 0.1").loss == expected


def test_a_type_by_set_replaces_the_table_and_comes_first(tmp_path: Path) -> None:
    assert overlaid(tmp_path, "", "algorithm.loss.type=gspo").loss == GspoLoss()
    found = overlaid(tmp_path, "", "algorithm.loss.eps_clip=3e-4", "algorithm.loss.type=gspo").loss
    assert found == GspoLoss(eps_clip=3e-4)
    assert overlaid(tmp_path, "", "algorithm.loss.type=ppo").loss == PpoLoss(eps_clip_high=0.28)
    assert overlaid(tmp_path, "", 'algorithm.loss={type="gspo"}').loss == GspoLoss()


def test_tables_without_a_default_are_left_out_by_their_type(tmp_path: Path) -> None:
    chosen = '[algorithm.length_penalty]\ntype = "linear"\nnum_turns_weight = 0.0'
    assert overlaid(tmp_path, chosen).length_penalty == LinearPenalty(num_turns_weight=0.0)
    assert overlaid(tmp_path, chosen, "algorithm.length_penalty.type=none").length_penalty is None
    assert overlaid(tmp_path, chosen, "algorithm.length_penalty=none").length_penalty is None
    assert overlaid(tmp_path, '[algorithm.tis]\ntype = "none"').tis is None
    weighed = overlaid(tmp_path, '[algorithm.tis]\ntype = "truncate"', "algorithm.use_rollout_logprobs=false")
    assert weighed.tis == TruncateTis()


def test_a_table_in_a_table_has_a_type_too(tmp_path: Path) -> None:
    teacher = '[engines.teacher]\nkind = "tiny"\nhf_checkpoint = "x/y"\n[algorithm.opd]\ntype = "sglang"\n'
    text = f'{teacher}[algorithm.opd.distillation]\ntype = "mixed"\ncoef = 0.5\nmixed_kl_weight = 0.1'
    assert overlaid(tmp_path, text).opd == SglangTeacher(distillation=MixedKl(coef=0.5, mixed_kl_weight=0.1))
    changed = overlaid(tmp_path, text, "algorithm.opd.distillation.type=forward", "algorithm.opd.distillation.coef=2")
    assert changed.opd == SglangTeacher(distillation=ForwardKl(coef=2.0))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '[algorithm.loss]\ntype = "gsop"',
            "algorithm.loss.type = \"gsop\": unknown type; allowed: 'ppo', 'gspo'",
        ),
        (
            '[algorithm.loss]\ntype = "gspo"\ntau_pos = 2.0',
            'algorithm.loss.tau_pos = 2.0: is a key of type = "sapo", not of "gspo"; '
            "allowed: type, eps_clip, eps_clip_high, eps_clip_c",
        ),
        ('[algorithm.loss]\ntype = "gspo"\neps_clip = 2.0', "algorithm.loss.eps_clip = 2.0: expected float < 1.0"),
        ('[algorithm.rs]\nlevel = "token"', "algorithm.rs.type: missing; allowed: 'ratio', 'binary_kl'"),
        ("algorithm.loss = 3", "algorithm.loss = 3: expected a table with a type; allowed: 'ppo'"),
        ("[algorithm.loss]\ntype = 3", "algorithm.loss.type = 3: unknown type; allowed: 'ppo'"),
        ("[algorithm.loss]\nepsclip = 3", "algorithm.loss.epsclip: unknown key, did you mean eps_clip?"),
    ],
)
def test_a_wrong_table_is_said_with_file_key_value_and_what_is_allowed(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(TopologyError) as caught:
        overlaid(tmp_path, text)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{tmp_path}/mine.toml: {line}")


def test_the_laptops_topology_names_its_loss() -> None:
    assert load_topology(LAPTOP).topology.algorithm.loss == PpoLoss(eps_clip_high=0.28)
