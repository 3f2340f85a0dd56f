"""How many tokens a micro-batch on the CPU has by default."""

import json
from pathlib import Path

from actors.trainer.models.config import read_hf_config
from actors.trainer.models.shapes import tokens_by_memory
from tests.actors.trainer.tiny import TINY
from tests.bench.bench_trainer import REAL


def test_activations_of_a_micro_batch_take_an_eighth_of_the_states(tmp_path: Path) -> None:
    """134.5M weights: 2.15 GB of states; 30 layers of 5 x 576 + 3 x 1536 floats a token. Tiny models have no limit."""
    found: list[int] = []
    for name, config in {"real": REAL, "tiny": TINY}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        found.append(tokens_by_memory(read_hf_config(tmp_path / name)))
    assert found[0] == 16 * 134_515_008 // 8 // (4 * 30 * (5 * 576 + 3 * 1536))
    assert found[1] > 9216
