"""Trains rows of the grid, and reads what they left."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file

from actors.trainer.checkpoints import checkpoints_in
from runtime.models.safetensors import safetensors_files
from runtime.settings.devices import HIDDEN
from runtime.settings.topology import Topology, encode_topology
from tests.actors.trainer.hf import write_model, write_mtp_model
from tests.build.topology import trainer_topology
from tests.grid.forked import forget_jobs, jobs_under_way
from tests.grid.rows import Row
from tests.support.checkpoint_tensors import tensors_of

Half = Literal["first", "second"]
ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("rank_program.py")
MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"head_dim": 16, "vocab_size": 96}
SPREAD = {2: 0.1, 4: 0.1, 6: 0.08, 8: 0.06}  # of first weights, by layers: so that rounding does not grow in them
CALM = {"deepseek_v3": 0.06}  # of kinds whose norms of short latents make more of rounding
LOSSES = ("train/loss", "train/mtp_loss", "train/value_loss", "rollout/values", "rollout/returns")
DIVERGENCES = ("train/kl_loss", "rollout/kl")  # in the loss; with a critic in the rewards
NORMS = ("train/grad_norm", "train/critic-grad_norm")
CRITIC = "critic."  # begins the names of its tensors in a checkpoint
NOISE = 0.05  # in norms and all else
LOG_CHARACTERS = 4000  # of the log of ranks that fail

# terms of every sample; the checkpoint after one step has the reference, which moves before the last
FOR_ALL: dict[str, Any] = {"entropy_coef": 0.05, "ref_update_interval": 2}


class Outcome(NamedTuple):
    """What a row's training came to."""

    metrics: list[dict[str, float]]  # of each step
    probe: list[float]  # log-probs of fixed tokens at the end
    weights: dict[str, torch.Tensor]  # at the end, by Hugging Face name; the critic's by name in the checkpoint
    moments: dict[str, torch.Tensor]  # of the optimizer at the end, by name in the checkpoint


class Job(NamedTuple):
    """A row to train, with a fault in it or none; or the checkpoint of another row to read and write again."""

    row: Row
    fault: str | None = None
    reads: Row | None = None

    @property
    def directory(self) -> str:
        """Where it is trained."""
        told = " ".join([self.row.name, self.fault or "", f"reads {self.reads.name}" if self.reads else ""])
        return "".join(char if char.isalnum() else "-" for char in told.strip())


def train(place: Path, jobs: Mapping[Job, Half], *, timeout_s: float, device: str = "cpu") -> None:
    """Train all jobs up to the half named, one after the other, their ranks beside each other.

    The second halves, from the checkpoints of the first, run in processes of their own.
    """
    for row in {_model(place, job.row): job.row for job in jobs}.values():
        spread = CALM.get(row.kind, SPREAD[row.num_layers])
        sizes = MODEL | {"num_hidden_layers": row.num_layers, "initializer_range": spread}
        if row.mtp:
            write_mtp_model(_model(place, row), noise=NOISE, **sizes)
        else:
            write_model(_model(place, row), row.kind, tied=row.tied, noise=NOISE, **sizes)
    for job in jobs:
        directory = place / job.directory
        directory.mkdir(parents=True)
        (directory / "topology.json").write_bytes(encode_topology(_topology(place, job.row, device)))
    _run(place, [job for job in jobs if job.reads is None], "first", timeout_s, device)
    for job in jobs:
        if job.reads is not None:
            shutil.copytree(place / Job(job.reads).directory / "checkpoints", place / job.directory / "checkpoints")
    _run(place, [job for job, last in jobs.items() if last == "second"], "second", timeout_s, device)


def copied(place: Path, job: Job) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All tensors of the checkpoint that a job read, and of the one that it wrote."""
    read, written = checkpoints_in(place / job.directory / "checkpoints")
    return tensors_of(read.path), tensors_of(written.path)


def outcome(place: Path, job: Job) -> Outcome:
    """What a job left."""
    directory = place / job.directory
    halves = [json.loads((directory / f"{half}.json").read_text()) for half in ("first", "second")]
    saved = tensors_of(checkpoints_in(directory / "checkpoints")[-1].path)
    return Outcome(
        [metrics for half in halves for metrics in half["metrics"]],
        halves[1]["probe"],
        published(Path(halves[1]["weights"])) | of_critic(saved),
        _moments(saved),
    )


def first_half(place: Path, job: Job) -> Outcome:
    """What the first half of a job left: weights by name in the checkpoint, and no log-probs of fixed tokens."""
    directory = place / job.directory
    metrics = json.loads((directory / "first.json").read_text())["metrics"]
    saved = tensors_of(checkpoints_in(directory / "checkpoints")[0].path)
    weights = {name: tensor for name, tensor in saved.items() if "optimizer." not in name}
    return Outcome(metrics, [], weights, _moments(saved))


def _moments(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in saved.items() if ".exp_avg" in name}


def of_critic(saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the critic in a checkpoint, without its optimizer."""
    own = (name for name in saved if name.startswith(CRITIC) and not name.startswith(f"{CRITIC}optimizer."))
    return {name: saved[name] for name in own}


def published(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a version; each pipeline stage has written files of its own."""
    return {name: tensor for file in safetensors_files(directory) for name, tensor in load_file(file).items()}


def _model(place: Path, row: Row) -> Path:
    mtp = "-mtp" if row.mtp else ""
    return place / f"{row.kind}-{row.num_layers}-{'tied' if row.tied else 'untied'}{mtp}"


def _topology(place: Path, row: Row, device: str) -> Topology:
    tables: dict[str, Any] = {
        "model": {"random_init": False, "dtype": row.dtype},
        "algorithm": {
            **({} if row.idle else FOR_ALL | {"kl": {"type": "k1", "reward_coef" if row.critic else "loss_coef": 0.1}}),
            "num_steps_per_rollout": 2,
            "use_routing_replay": row.replay,
            "use_rollout_routing_replay": row.told,
            "keep_old_actor": row.aged,
            **({"normalize_advantages": True, "estimator": {"type": "ppo"}} if row.critic else {}),
        },
        "critic": {"init_method_std": 0.1, "lr": 3e-3} if row.critic else {},
        "rollout": {
            "return_sampling_mask": row.kept,
            "max_token_staleness": 2 if row.aged else None,
            **({"top_p": 0.9, "top_k": 8} if row.kept else {}),
        },
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-4},  # at 1e-8 correct code differs by 3e-5
        "train": {"max_tokens_per_gpu": row.max_tokens, "num_steps": 3},
        "trainer": {"device": device, "export_bucket_bytes": 20_000, **row.trainer()},
    }
    return trainer_topology(_model(place, row), place, **tables)


def _run(place: Path, jobs: Sequence[Job], half: str, timeout_s: float, device: str) -> None:
    described = [
        {
            "name": job.directory,
            "world": job.row.world,
            "fault": job.fault,
            "reads": job.reads is not None,
            "spoilt": job.row.spoilt,
            "idle": job.row.idle,
            "prompts": job.row.prompts,
        }
        for job in jobs
    ]
    (place / "jobs.json").write_text(json.dumps(described))
    world = max(job.row.world for job in jobs)
    run_ranks(PROGRAM, place, half, world=world, timeout_s=timeout_s, device=device)


def run_ranks(program: Path, place: Path, *words: str, world: int = 2, timeout_s: float, device: str = "cpu") -> None:
    """Run a program as several ranks, with arguments WORLD PLACE and the given words.

    Raises:
        AssertionError: They did not end with 0, or not in time. The text names the job of each rank, and has the end of
            their log.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        environment |= HIDDEN
    command = [sys.executable, str(program), str(world), str(place), *words]
    forget_jobs(place, world)
    log = place / f"{' '.join([program.stem, *words])}.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, env=environment, start_new_session=True, stdout=out, stderr=out) as ranks,
    ):
        try:
            ended = f"ended with exit code {code}" if (code := ranks.wait(timeout=timeout_s)) else ""
        except subprocess.TimeoutExpired:
            ended = f"did not end within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(ranks.pid, signal.SIGKILL)
    told = log.read_text(errors="replace")[-LOG_CHARACTERS:]
    assert not ended, f"{log.stem} {ended}; jobs: {jobs_under_way(place, world)}; the end of the log:\n{told}"


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """How far a row is from the single rank, by what is compared."""

    def metric(name: str, *, relative: bool = False) -> float:
        pairs = [(one[name], other[name]) for one, other in zip(found.metrics, expected.metrics, strict=True)]
        return max(abs(one - other) / (abs(other) if relative else 1.0) for one, other in pairs)

    probes = zip(found.probe, expected.probe, strict=True)
    if found.weights.keys() != expected.weights.keys() or found.moments.keys() != expected.moments.keys():
        return {"weights": math.inf}
    return {
        "loss": max(metric(name) for name in LOSSES if name in expected.metrics[0]),
        "entropy": metric("train/entropy_loss"),
        "KL": max((metric(name) for name in DIVERGENCES if name in expected.metrics[0]), default=0.0),
        "gradient norm": max(metric(name, relative=True) for name in NORMS if name in expected.metrics[0]),
        "log-probs": max((abs(one - other) for one, other in probes), default=0.0),
        "weights": max(_apart(found.weights[name], expected.weights[name]) for name in expected.weights),
        "moments": max(_of_largest(found.moments, expected.moments, kind) for kind in (".exp_avg.", ".exp_avg_sq.")),
    }


def _of_largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], kind: str) -> float:
    names = [name for name in expected if kind in name]
    largest = max(float(expected[name].abs().max()) for name in names)
    return max(_apart(found[name], expected[name]) for name in names) / largest


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())
