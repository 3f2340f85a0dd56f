"""Weights on their way to files: their checksum, what a failure says, and how much memory it takes."""

import ctypes
import json
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.distributed as dist

from actors.trainer.models.config import HfConfig, read_hf_config
from actors.trainer.models.cuts import rank_part
from actors.trainer.models.gathering import Part, own_parts
from actors.trainer.models.handover import Handover, copied
from actors.trainer.models.shapes import hf_shapes
from actors.trainer.models.sources import Cut
from runtime.checksums import checksums_of, shapes_in
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.models.test_model_parity import load
from tests.actors.trainer.tiny import TINY

CPU = torch.device("cpu")
MB = 1 << 20
BUCKET = 4 * MB
COPY_BUCKET = 32 * MB  # of the largest tensor
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 16384}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
LARGEST = 16384 * 512 * 4


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_files_have_all_tensors_and_the_checksum_that_is_told(tmp_path: Path, bucket_bytes: int) -> None:
    reference = write_model(tmp_path)
    built, hf = load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    told = Handover(own_parts([built], hf), hf, out, device=CPU, bucket_bytes=bucket_bytes).finish()
    assert told == checksums_of(out).total == checksums_of(tmp_path).total
    assert shapes_in(out) == {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}


def test_a_directory_that_cannot_be_written_fails_with_the_rank_and_the_reason(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    handover = Handover(own_parts([built], hf), hf, tmp_path / "gone", device=CPU, bucket_bytes=3000)
    with pytest.raises(OSError, match=r"could not be written to .*/gone: rank 0: FileNotFoundError: .*gone"):
        handover.finish()


def test_a_copy_is_written_as_it_was_while_the_model_changes(tmp_path: Path) -> None:
    write_model(tmp_path)
    built, hf = load(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    handover = Handover(copied(own_parts([built], hf)), hf, out, device=CPU, bucket_bytes=3000)
    steps = 0
    while handover.advance():
        with torch.no_grad():
            built.decoder.final_layernorm.weight.add_(1.0)
        if handover.writing is not None:
            handover.writing.result(10)
        steps += 1
    assert steps > 3
    assert handover.finish() == checksums_of(out).total == checksums_of(tmp_path).total


@pytest.fixture
def plain_malloc() -> None:
    """Memory of tensors is given back when they go, so that what is measured is theirs."""
    ctypes.CDLL(None).mallopt(-3, MB)  # M_MMAP_THRESHOLD


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The most anonymous memory beyond that of the begin."""

    def __enter__(self) -> "Peak":
        self._end, self._before, self.bytes = Event(), anonymous(), 0
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.0005):
            self.bytes = max(self.bytes, anonymous() - self._before)

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()


def parts_of(hf: HfConfig, ranks: int) -> list[Part]:
    """Megatron's tensors of a rank, the embedding first and last."""
    shapes = hf_shapes(hf)

    def drawn(name: str, cut: Cut | None = None) -> torch.Tensor:
        whole = torch.full(shapes[name], 0.5)
        return whole if cut is None else cut.of(whole)

    dims = {"embedding.word_embeddings.weight": 0}
    for layer in range(hf.num_hidden_layers):
        prefix = f"decoder.layers.{layer}."
        dims |= {f"{prefix}self_attention.linear_qkv.weight": 0, f"{prefix}self_attention.linear_proj.weight": 1}
        dims |= {f"{prefix}mlp.linear_fc1.weight": 0, f"{prefix}mlp.linear_fc2.weight": 1}
    dims["output_layer.weight"] = 0
    return [
        Part((name,), rank_part(name, hf, drawn, Cut(dim, 0, ranks) if ranks > 1 else None).clone(), dim, ranks, None)
        for name, dim in dims.items()
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("plain_malloc")
def test_an_export_takes_two_buckets_and_twice_the_largest_tensor_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | LARGE))
    hf = read_hf_config(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    parts = parts_of(hf, ranks)
    gather_alike(monkeypatch, ranks)
    with Peak() as peak:
        Handover(parts, hf, out, device=CPU, bucket_bytes=BUCKET).finish()
    size = sum(file.stat().st_size for file in out.iterdir())
    assert size > 150 * MB
    assert peak.bytes <= 2 * BUCKET + 2 * LARGEST, peak.bytes / MB
    assert peak.bytes > (LARGEST // 2 if ranks > 1 else 0)  # it is seen at all


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("plain_malloc")
def test_an_export_of_a_copy_takes_a_rank_s_part_and_two_buckets_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | LARGE))
    hf = read_hf_config(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    parts = parts_of(hf, ranks)
    own = sum(part.tensor.nbytes for part in parts)
    gather_alike(monkeypatch, ranks)
    with Peak() as peak:
        Handover(copied(parts), hf, out, device=CPU, bucket_bytes=COPY_BUCKET).finish()
    assert own < peak.bytes <= own + 2 * COPY_BUCKET + 4 * MB, (peak.bytes / MB, own / MB)


def gather_alike(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each other rank has the same part as this one."""

    def gather(own: torch.Tensor, collected: list[torch.Tensor], **_options: object) -> None:
        for tensor in collected:
            tensor.copy_(own)

    if ranks > 1:
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: list(range(ranks)))
        monkeypatch.setattr(dist, "gather", gather)
