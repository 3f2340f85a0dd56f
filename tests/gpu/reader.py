"""Reads buckets as an engine does, in a process of its own: `python -m tests.gpu.reader`, one JSON line each way.

A line has `payload`, base64 of a pickle, and `do`: `sums` answers the CRC of each tensor, `load` copies them into
tensors of its own, `hold` keeps the bucket until it is killed.
"""

import base64
import json
import pickle
import sys
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from actors.trainer.models.shards import bytes_of, entry_of
from runtime.models.checksums import fingerprint

rebuild = reductions.rebuild_cuda_tensor


def by_uuid(*arguments: Any) -> Tensor:
    """As SGLang's: the GPU comes by its UUID (sglang/srt/utils/patch_torch.py)."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    return rebuild(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


def tensors_of(payload: str) -> dict[str, Tensor]:
    found = pickle.loads(base64.b64decode(payload))
    flat = found["flattened_tensor"]
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in found["metadata"]
    }


def main() -> None:
    """Answer until the input ends."""
    reductions.rebuild_cuda_tensor = by_uuid
    own: dict[str, Tensor] = {}
    held: list[dict[str, Tensor]] = []
    for line in sys.stdin:
        asked = json.loads(line)
        tensors = tensors_of(asked["payload"])
        answer: dict[str, str] = {}
        if asked["do"] == "load":
            for name, tensor in tensors.items():
                own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        else:
            for name, tensor in tensors.items():
                entry = entry_of(name, tensor)
                answer[name] = fingerprint(name, entry.dtype, entry.shape, bytes_of(tensor))
        if asked["do"] == "hold":
            held.append(tensors)
        elif torch.cuda.is_available():
            torch.cuda.synchronize()
        tensors = tensor = None  # let go before it is answered
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
