"""The default dtype of a recipe without model.dtype: on GPUs the checkpoint's."""

from pathlib import Path
from typing import Final, Literal

import msgspec

from runtime.settings.topology import Topology

OF_STORED: Final[dict[str | None, Literal["float32", "bfloat16"]]] = {  # a model in float16 trains in bfloat16
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
}


class _Stored(msgspec.Struct, frozen=True):
    """The dtype in config.json; transformers 4 uses the longer name."""

    dtype: str | None = None
    torch_dtype: str | None = None


def with_default_dtype(topology: Topology, device: str) -> Topology:
    """Fill in model.dtype from the model directory, for a recipe without it.

    A config.json that is missing or unreadable changes nothing here: reading the model reports it later.

    Args:
        topology: of the whole run, or of the half that runs.
        device: of the trainer in the whole topology: a run without a trainer generates samples for that device.
    """
    if device != "cuda":
        return topology
    try:
        stored = msgspec.json.decode((Path(topology.model.hf_checkpoint) / "config.json").read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return topology
    dtype = OF_STORED.get(stored.dtype or stored.torch_dtype, topology.model.dtype)
    return msgspec.structs.replace(topology, model=msgspec.structs.replace(topology.model, dtype=dtype))
