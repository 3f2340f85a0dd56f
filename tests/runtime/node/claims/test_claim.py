"""The claim on a run directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.node.claims.claim import Claim, RunClaimed, kept_unclaimed, refuse_claimed
from runtime.node.claims.rundir import raise_incarnation


def test_a_second_claim_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with Claim.take(tmp_path / "run"), pytest.raises(RunClaimed, match=f"process {os.getpid()} on") as refused:
        Claim.take(tmp_path / "run")
    assert refused.value.holder is not None
    assert refused.value.holder.pid == os.getpid()


def test_a_claim_ends_with_its_context_and_the_incarnation_counts_on(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with Claim.take(tmp_path) as claim:
            assert raise_incarnation(claim.run_dir) == expected


def test_a_claim_ends_with_its_process_even_when_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from runtime.node.claims.claim import Claim;"
        "claim = Claim.take(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=10, check=False)
    assert ended.returncode == -9
    with Claim.take(tmp_path):
        pass


def test_nodes_that_share_a_directory_claim_it_side_by_side(tmp_path: Path) -> None:
    with Claim.take(tmp_path, node="n0"), Claim.take(tmp_path, node="n1"):
        pass


def test_spectators_keep_a_directory_unclaimed_together_and_only_for_their_blocks(tmp_path: Path) -> None:
    with Claim.take(tmp_path), kept_unclaimed(tmp_path) as unclaimed:
        assert not unclaimed
    with kept_unclaimed(tmp_path) as first, kept_unclaimed(tmp_path) as second:
        assert first
        assert second
        with pytest.raises(RunClaimed):
            Claim.take(tmp_path)
    with Claim.take(tmp_path):
        pass


def test_spectators_see_the_claim_of_each_node_of_a_shared_directory(tmp_path: Path) -> None:
    with Claim.take(tmp_path, node="n1"), kept_unclaimed(tmp_path) as unclaimed:
        assert not unclaimed
    with kept_unclaimed(tmp_path) as unclaimed:
        assert unclaimed
        with pytest.raises(RunClaimed):
            Claim.take(tmp_path, node="n1")


@pytest.mark.parametrize(
    ("held", "started", "is_refused"),
    [
        (None, None, True),
        ("n1", None, True),
        (None, "n0", True),
        ("n0", "n0", True),
        ("n1", "n0", False),
    ],
)
def test_a_start_is_refused_beside_an_agent_that_holds_the_directory_or_its_own_part(
    tmp_path: Path, held: str | None, started: str | None, is_refused: bool
) -> None:
    with Claim.take(tmp_path, node=held):
        if is_refused:
            with pytest.raises(RunClaimed, match=f"process {os.getpid()} on"):
                refuse_claimed(tmp_path, started)
        else:
            refuse_claimed(tmp_path, started)
    refuse_claimed(tmp_path, started)


def test_a_claim_does_not_refuse_its_own_holder(tmp_path: Path) -> None:
    with Claim.take(tmp_path, node="n0") as claim:
        refuse_claimed(tmp_path, "n0", held=claim)
    with Claim.take(tmp_path, node="n1"), Claim.take(tmp_path) as claim, pytest.raises(RunClaimed):
        refuse_claimed(tmp_path, None, held=claim)
