"""What the trainer adds to dumps: written files are read again, and what does not fit is named."""

from pathlib import Path
from threading import Event

import numpy as np
import pytest

from runtime.data import trained_tokens
from runtime.data.columns import DumpError
from runtime.data.trained_tokens import TokenWriter, TrainedTokens, read_trained, trained_path, write_trained


def example() -> TrainedTokens:
    """Samples 0 and 1 of group 4, of 2 and 3 tokens, and sample 0 of group 5, which is left out."""
    return TrainedTokens(
        group_id=np.array([4, 4, 5]),
        index=np.array([0, 1, 0]),
        part=np.array([0, 0, 0]),
        left_out=np.array([0, 0, 2], dtype=np.uint8),
        lengths=np.array([2, 3, 1]),
        trainer_log_probs=np.array([np.nan, -0.5, np.nan, -1.5, -2.5, np.nan], dtype=np.float32),
        rules=np.array([0, 1, 0, 2, 3, 0], dtype=np.uint32),
        staleness=np.array([-1, 0, -1, 1, 1, -1], dtype=np.int32),
        rule_names=("loss_mask", "clip"),
        reasons=("too_long", "invalid"),
    )


def test_a_sample_is_found_by_its_key(tmp_path: Path) -> None:
    write_trained(tmp_path, 3, example())
    found = read_trained(tmp_path, 3, (4, 1, 0), num_tokens=3)
    assert found is not None
    assert (found.left_out, found.rule_names) == ("", ("loss_mask", "clip"))
    np.testing.assert_array_equal(found.trainer_log_probs, [np.nan, -1.5, -2.5])
    assert (found.rules.tolist(), found.staleness.tolist()) == ([0, 2, 3], [-1, 1, 1])
    left_out = read_trained(tmp_path, 3, (5, 0, 0), num_tokens=700)
    assert left_out is not None
    assert (left_out.left_out, len(left_out.rules)) == ("invalid", 0)
    assert read_trained(tmp_path, 3, (6, 0, 0), num_tokens=1) is None
    assert read_trained(tmp_path, 4, (4, 0, 0), num_tokens=2) is None


def test_a_file_of_other_samples_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    write_trained(tmp_path, 3, example())
    with pytest.raises(DumpError, match=r"trained_3.npz: sample \(4, 0, 0\) has 2 tokens; its dump has 5"):
        read_trained(tmp_path, 3, (4, 0, 0), num_tokens=5)
    trained_path(tmp_path, 3).write_bytes(b"PK damaged")
    with pytest.raises(DumpError, match=r"trained_3.npz: cannot be read"):
        read_trained(tmp_path, 3, (4, 0, 0), num_tokens=2)


def test_a_slow_disk_costs_files_of_later_steps_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = Event(), write_trained

    def slow(directory: Path, step: int, tokens: TrainedTokens) -> None:
        assert go_on.wait(20)
        write(directory, step, tokens)

    monkeypatch.setattr(trained_tokens, "write_trained", slow)
    writer = TokenWriter(str(tmp_path / "dump"))
    for step in range(3):
        writer.begin(step, example())
    go_on.set()
    assert writer._writing is not None
    writer._writing.result(20)
    writer.begin(9, example())
    writer._writing.result(20)
    writer.close()
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["trained_0.npz", "trained_9.npz"]


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = TokenWriter(str(tmp_path / "file"))
    writer.begin(0, example())
    assert writer._writing is not None
    writer._writing.result(20)
    writer.close()
