"""A teacher for the laptop topology: random weights that are not those of the run."""

import shutil
from pathlib import Path

from tests.support.tiny_models import write_weights

STUDENT = Path(__file__).parents[2] / "topologies/demo/models/reverse-digits"


def write_teacher(directory: Path) -> Path:
    """Write a model with the config and tokenizer of the laptop topology's model."""
    shutil.copytree(STUDENT, directory)
    write_weights(directory, directory, seed=5)
    return directory
