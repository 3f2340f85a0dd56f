"""Which experts a router is told to take."""

import numpy as np
import pytest
import torch

from actors.trainer.data.batch import NOT_KNOWN, expert_ids
from actors.trainer.megatron.layers.router import is_known


@pytest.mark.parametrize(("highest", "dtype"), [(254, "uint8"), (255, "int16"), (511, "int16")])
def test_a_choice_that_is_not_told_is_no_expert_however_many_there_are(highest: int, dtype: str) -> None:
    given = expert_ids(np.array([NOT_KNOWN, 0, highest]), highest)
    assert given.dtype == dtype
    assert is_known(torch.from_numpy(given), 512).tolist() == [False, True, True]
    assert is_known(torch.from_numpy(given), highest).tolist() == [False, True, False]
