"""Checkpoints that are written in the foreground."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.trainer.checkpoints import Checkpoint
from actors.trainer.commands import TrainerRank
from actors.trainer.megatron.checkpoint import begin_save
from actors.trainer.megatron.rank_model import Replica


def save_checkpoint(replica: Replica, root: Path, *, step: int, incarnation: int) -> Path:
    """Write a checkpoint of one replica and return its directory. A collective of all ranks."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return begin_save(replica, root, executor, step=step, incarnation=incarnation).finish()


def save(rank: TrainerRank, *, step: int, incarnation: int = 1) -> tuple[Path, list[Checkpoint]]:
    """Write a checkpoint of all ranks; return its directory and the remaining checkpoints, oldest first."""
    rank.begin_save(step=step, incarnation=incarnation)
    return rank.finish_save()
