"""Planted faults between a trainer and a tiny engine: which check finds which. The table is in weight-sync.md.

Trainer, files, engine and verification are real. A fault on the way changes the files after the trainer summed them up.
A fault in the export is in the sums too, as where the trainer gives a tensor another one's name.
"""

import json
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.rollout.engines.weights.verification import WeightsMismatch
from actors.rollout.engines.weights.verifier import WeightVerifier
from actors.rollout.sglang.client import SglangClient
from actors.trainer.commands import TrainerRank
from actors.trainer.megatron import groups as ranks
from actors.trainer.models.config import read_hf_config
from actors.trainer.weights.engine_sums import Layout, SumsSink, joined_sums
from actors.trainer.weights.publish import Published
from messages import WeightsAnnounced
from tests.actors.trainer.hf import write_model
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import trainer_topology
from tests.support.rollout import announcement
from tests.support.tiny_engine import running_engine
from tests.support.tiny_models import write_tokenizer
from tests.support.weight_line import carried_out, verifier_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Tensors = dict[str, Tensor]
LAYER: Final = "model.layers.1."
DOWN: Final = f"{LAYER}mlp.down_proj.weight"
QUERY: Final = f"{LAYER}self_attn.q_proj.weight"
NOISE: Final = 0.3  # in the model's weights, so that its log-probs depend on them


def one_bit(tensors: Tensors) -> None:
    """The lowest one of a number."""
    whole = {2: torch.int16, 4: torch.int32}[tensors[DOWN].itemsize]
    tensors[DOWN].view(whole)[0, 0] ^= 1


def one_percent(tensors: Tensors) -> None:
    tensors[DOWN] *= 1.01


def swapped(tensors: Tensors) -> None:
    gate, up = f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def in_the_wrong_place(tensors: Tensors) -> None:
    """The parts of the tensor-parallel ranks in another order."""
    first, second = tensors[QUERY].chunk(2)
    tensors[QUERY] = torch.cat([second, first])


def twice_its_scale(tensors: Tensors) -> None:
    for name in tensors:
        if name.startswith(LAYER) and name.endswith("_proj.weight"):
            tensors[name] = tensors[name] * 2


ON_THE_WAY: Final[dict[str, Callable[[Tensors], None]]] = {"one bit": one_bit, "1 %": one_percent}
IN_THE_EXPORT: Final[dict[str, Callable[[Tensors], None]]] = {
    "tensors of one shape swapped": swapped,
    "a part in the wrong place": in_the_wrong_place,
    "a layer at twice its scale": twice_its_scale,
}
OF_THE_ENGINE: Final[dict[str, dict[str, Any]]] = {
    "another RoPE base": {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
    "another epsilon of the norms": {"rms_norm_eps": 0.1},
}


class Run(NamedTuple):
    """Two versions of a trainer, which an engine serves."""

    dtype: str
    model: Path
    before: Published
    now: Published


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained("qwen3", str(request.param), tmp_path_factory.mktemp("run"))


def trained(kind: str, dtype: str, directory: Path) -> Run:
    model = directory / "model"
    write_model(model, kind, noise=NOISE)
    write_tokenizer(model)
    ranks.leave()
    topology = trainer_topology(
        model,
        directory,
        model={"random_init": False, "dtype": dtype},
        engines={"policy": {"kind": "tiny"}},
        optimizer={"lr": 1e-4},
    )
    rank = TrainerRank(topology, directory / "run")
    before = rank.publish(1, confirmed=0)
    rank.train(random_batch(0))
    now = rank.publish(2, confirmed=0)
    rank.close()
    return Run(dtype, model, before, now)


@contextmanager
def engine_of(run: Run) -> Iterator[str]:
    flags = ("--load-format", "dummy", "--dtype", run.dtype)
    with running_engine(run.model, *flags) as engine:
        yield engine.url


@pytest.fixture(scope="module")
def url(run: Run) -> Iterator[str]:
    with engine_of(run) as url:
        yield url


def announced(published: Published, **changes: Any) -> WeightsAnnounced:
    told = {
        "path": str(published.path),
        "checksum": published.checksum,
        "probe": published.probe,
        "engine_sums": published.sums,
    }
    return announcement(1, **(told | changes))


def altered(published: Published, change: Callable[[Tensors], None], directory: Path) -> Path:
    assert published.path is not None
    shutil.copytree(published.path, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def verified(client: SglangClient, url: str, run: Run, told: WeightsAnnounced) -> WeightVerifier:
    """Update the engine by a rollout actor that has seen no other engine."""
    verifier = verifier_of(client, "in_place", trainer_dtype=run.dtype)
    await carried_out(verifier.update("engine-0", url, told, first=True))
    return verifier


@pytest.fixture
async def right_after(client: SglangClient, url: str, run: Run) -> AsyncGenerator[None]:
    """After the fault, the right weights are taken: it was the fault that was refused."""
    yield
    verifier = await verified(client, url, run, announced(run.now))
    assert verifier.take_not_compared() == {}


@pytest.mark.usefixtures("right_after")
@pytest.mark.parametrize("fault", ON_THE_WAY)
async def test_sums_find_what_changed_on_the_way_to_the_first_engine(
    fault: str, client: SglangClient, url: str, run: Run, tmp_path: Path
) -> None:
    path = altered(run.now, ON_THE_WAY[fault], tmp_path / "v2")
    with pytest.raises(WeightsMismatch, match=rf"1 of its \d+ tensors differ from the trainer's sums.* {DOWN}$"):
        await verified(client, url, run, announced(run.now, path=str(path)))
    told = announced(run.now, path=str(path), engine_sums=None)
    if (fault, run.dtype) == ("1 %", "float32"):
        with pytest.raises(WeightsMismatch, match="its log-probs of the probe differ from the trainer's"):
            await verified(client, url, run, told)
    else:
        await verified(client, url, run, told)  # the probe does not see it


@pytest.mark.usefixtures("right_after")
async def test_sums_find_a_stale_version_at_the_first_engine(client: SglangClient, url: str, run: Run) -> None:
    with pytest.raises(WeightsMismatch, match="tensors differ from the trainer's sums"):
        await verified(client, url, run, announced(run.now, path=str(run.before.path)))


async def test_an_engine_with_experts_is_compared_with_the_sums_of_both_versions(
    client: SglangClient, tmp_path: Path
) -> None:
    run = trained("qwen3_moe", "float32", tmp_path)
    expert = f"{LAYER}mlp.experts.3.down_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[expert][0, 0] *= 1.01

    path = altered(run.now, change, tmp_path / "v3")
    with engine_of(run) as url:
        for version in (run.before, run.now):
            assert version.sums is not None
            await verified(client, url, run, announced(version))
            assert (await client.checksums(url)).per_engine_checksum == version.sums.checksum
        with pytest.raises(WeightsMismatch, match=rf"1 of its \d+ tensors differ .* {LAYER}mlp.experts.w2_weight$"):
            await verified(client, url, run, announced(run.now, path=str(path)))


@pytest.mark.usefixtures("right_after")
@pytest.mark.parametrize("fault", IN_THE_EXPORT)
async def test_the_probe_finds_what_is_in_the_sums_too(
    fault: str, client: SglangClient, url: str, run: Run, tmp_path: Path
) -> None:
    path = altered(run.now, IN_THE_EXPORT[fault], tmp_path / "v2")
    layout = Layout(dtype=getattr(torch, run.dtype), is_padded=False)
    sink = SumsSink(read_hf_config(run.model), layout)
    sink.take(list(load_file(path / "model.safetensors").items()))()
    wrong = announced(run.now, path=str(path), engine_sums=joined_sums(layout, [sink.close()]))
    with pytest.raises(WeightsMismatch, match="its log-probs of the probe differ from the trainer's"):
        await verified(client, url, run, wrong)
    assert (await client.checksums(url)).per_engine_checksum == wrong.engine_sums.checksum  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("fault", OF_THE_ENGINE)
async def test_the_probe_finds_an_engine_that_computes_another_model(
    fault: str, client: SglangClient, run: Run, tmp_path: Path
) -> None:
    """Its own comparison of the files' config.json, which not every engine makes, is led astray."""
    model, path = tmp_path / "model", altered(run.now, lambda _: None, tmp_path / "v2")
    shutil.copytree(run.model, model)
    for directory in (model, path):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | OF_THE_ENGINE[fault]))
    with (
        engine_of(run._replace(model=model)) as url,
        pytest.raises(WeightsMismatch, match="its log-probs of the probe differ from the trainer's"),
    ):
        await verified(client, url, run, announced(run.now, path=str(path)))
