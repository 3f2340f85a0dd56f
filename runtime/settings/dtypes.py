"""The dtype of a recipe that names none: on a GPU its checkpoint's, as everybody expects there."""

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
    """What config.json says of it; transformers 4 has the longer name."""

    dtype: str | None = None
    torch_dtype: str | None = None


def with_default_dtype(topology: Topology, device: str) -> Topology:
    """The topology of a recipe without model.dtype, once its model directory is known.

    A config.json that is missing or cannot be read changes nothing: it is complained of where the model is read.

    Args:
        topology: of the recipe, or of the half of it that is run.
        device: of the trainer in the whole recipe: engines of a run without a trainer make samples for it.
    """
    if device != "cuda":
        return topology
    try:
        stored = msgspec.json.decode((Path(topology.model.hf_checkpoint) / "config.json").read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError):
        return topology
    dtype = OF_STORED.get(stored.dtype or stored.torch_dtype, topology.model.dtype)
    return msgspec.structs.replace(topology, model=msgspec.structs.replace(topology.model, dtype=dtype))
