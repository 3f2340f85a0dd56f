"""The numbers that functions of other projects return, as peer_numbers.py has written them."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

PEERS: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("peer_numbers.json").read_text())
VERL, SLIME, PRIME_RL, AREAL, NEMO_RL = (PEERS[name] for name in PEERS if " " in name)
LENGTHS: Final[list[int]] = PEERS["lengths"]
TRAINS, KL = np.array(PEERS["trains"]) > 0, np.array(PEERS["kl"])
GROUPS, REWARDS = np.array(PEERS["groups"]), np.array(PEERS["rewards"])


def column(name: str, *, gradient: bool = False) -> torch.Tensor:
    """A column of the inputs, in float32."""
    return torch.tensor(PEERS["columns"][name], dtype=torch.float32, requires_grad=gradient)
