"""A train step of ours against a plain transformers loop, CPU seconds of one thread, in turns. Prints JSON.

Run: python -m tests.bench.bench_transformers. The loop has what a step cannot do without: SDPA, log-probs of the rows
that train, PPO's loss, clipped gradients, fused AdamW. Its head is applied to all rows, as transformers does, and to
those rows alone; of three widths of its length buckets the fastest counts. Ours has its usual metrics: entropy, clip
fraction, KL to the old policy, distance to the engine.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.settings.placement import MOST_TOKENS
from tests.bench.bench_trainer import random_batch as laptop_batch
from tests.bench.rig import rounded

ROOT = Path(__file__).resolve().parents[2]
HEADS: Final = ("all", "trained")  # the rows of hidden states that the loop makes logits of
WIDTHS: Final = (16, 64, 4096)  # of the loop's length buckets, in tokens
TABLES: dict[str, Any] = {
    "run": {"name": "bench"},
    "engines": {},
    "data": [],
    "trainer": {"device": "cpu"},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_response_len": 192},
    "algorithm": {"num_steps_per_rollout": 1, "use_rollout_logprobs": True},
    "optimizer": {"lr": 1e-4, "weight_decay": 0.1},
}
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.02,
}


class Case(NamedTuple):
    """A model and batches for it."""

    topology: Any
    batches: list[Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="of each side, in turns")
    parser.add_argument("--steps", type=int, default=10, help="train steps of a run")
    parser.add_argument("--trained", type=float, default=0.5, help="share of a sample's tokens that trains")
    parser.add_argument("--tied", action="store_true", help="the embedding is the output weight")
    parser.add_argument("--profile", action="store_true", help="say where the time of our steps goes")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    print(json.dumps({name: measure(name, args) for name in args.case or CASES}, indent=2))
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides' CPU seconds for a train step: median of all runs, and all of them."""
    from actors.trainer.commands import TrainerRank

    with tempfile.TemporaryDirectory() as folder:
        case = CASES[name](Path(folder), args)
        engine = TrainerRank(case.topology, Path(folder))
        sides: dict[str, Callable[[Any], object]] = {"ours": engine.train}
        for head in HEADS:
            sides |= {
                f"loop, head of {head} rows, width {width}": plain_loop(case.topology, width, head=head)
                for width in WIDTHS
            }
        for step in sides.values():
            step(case.batches[0])
        if args.profile:
            print_profile(lambda: [engine.train(batch) for batch in case.batches])
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.runs):
            for side, step in sides.items():
                begin = time.process_time()
                for batch in case.batches:
                    step(batch)
                seconds[side].append((time.process_time() - begin) / len(case.batches))
        engine.close()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    best = {head: min(value for side, value in medians.items() if f"of {head} rows" in side) for head in HEADS}
    tokens = statistics.mean(int(batch.lengths_B.sum()) for batch in case.batches)
    return rounded(
        {
            "tokens": tokens,
            "trained_tokens": statistics.mean(int(batch.loss_mask_N.sum()) for batch in case.batches),
            "loop_by_ours": {f"head of {head} rows": value / medians["ours"] for head, value in best.items()},
            "cpu_s_per_step": {side: {"median": medians[side], "all": values} for side, values in seconds.items()},
        }
    )


def print_profile(call: Callable[[], object]) -> None:
    """By torch's operations and by Python's functions, to standard error."""
    import cProfile
    import pstats

    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40), file=sys.stderr)
    python = cProfile.Profile()
    python.runcall(call)
    pstats.Stats(python, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def laptop(folder: Path, args: argparse.Namespace) -> Case:
    """The laptop recipe's model and sizes."""
    from runtime.settings.load import load_topology

    del folder
    topology = load_topology(ROOT / "topologies" / "laptop.toml").topology
    return Case(topology, [laptop_batch(step, topology.rollout.rollout_batch_size) for step in range(args.steps)])


def of_vocabulary(size: int, **sizes: int) -> Callable[[Path, argparse.Namespace], Case]:
    """Hidden 256 and 4 layers if nothing else is given, batches of 2,048 tokens."""

    def case(folder: Path, args: argparse.Namespace) -> Case:
        import msgspec

        from runtime.settings.topology import Topology

        config = MODEL | sizes | {"vocab_size": size, "tie_word_embeddings": args.tied}
        (folder / "config.json").write_text(json.dumps(config))
        tables = TABLES | {
            "model": {"hf_checkpoint": str(folder), "random_init": True},
            "train": {"num_steps": args.steps},
        }
        batches = [ragged_batch(step, size, args.trained) for step in range(args.steps)]
        return Case(msgspec.convert(tables, Topology), batches)

    return case


CASES: dict[str, Callable[[Path, argparse.Namespace], Case]] = {
    "vocabulary_4096": of_vocabulary(4096),
    "vocabulary_32768": of_vocabulary(32768),
    "deep": of_vocabulary(4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, head_dim=64),
    "laptop": laptop,
}


def ragged_batch(
    step: int, vocabulary: int, trained: float, *, pairs: int = 8, shortest: int = 64, longest: int = 192
) -> Any:
    """Samples of 64 to 192 tokens, 128 on average; the last tokens of each train."""
    import numpy as np

    from actors.trainer.data.batch import TrainBatch

    generator = np.random.default_rng(step)
    half = generator.integers(shortest, longest + 1, pairs)
    lengths, count = generator.permutation(np.concatenate([half, shortest + longest - half])), 2 * pairs
    mask = np.concatenate([np.arange(length) >= round(length * (1 - trained)) for length in lengths])
    return TrainBatch(
        step=step,
        groups_B=np.arange(count) // 4,
        rollouts_B=np.arange(count),
        indices_B=np.arange(count) % 4,
        parts_B=np.zeros(count, dtype=np.int64),
        rewards_B=(rewards := generator.random(count)),
        raw_rewards_B=rewards,
        truncated_B=np.zeros(count, dtype=np.uint8),
        left_out_B=np.zeros(count, dtype=np.uint8),
        lengths_B=lengths,
        tokens_N=generator.integers(0, vocabulary, len(mask)).astype(np.int32),
        loss_mask_N=mask.astype(np.uint8),
        rollout_log_probs_N=np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
        staleness_N=np.where(mask, 0, -1).astype(np.int32),
    )


def plain_loop(topology: Any, width: int, device: str = "cpu", *, head: str = "all") -> Callable[[Any], None]:
    """A train step as one writes it with transformers and torch alone; in bfloat16 by autocast, on float32 weights.

    Args:
        topology: of the model and the algorithm.
        width: of buckets of like length, in tokens.
        device: that computes.
        head: of "all" rows, as transformers' models have it, or of those that are "trained" alone.
    """
    import numpy as np
    import torch
    import transformers

    from actors.trainer.algorithms.group_baselines import grpo_advantages
    from runtime.settings.tables.losses import PpoLoss

    config = transformers.AutoConfig.from_pretrained(topology.model.hf_checkpoint, attn_implementation="sdpa")
    model: Any = transformers.AutoModelForCausalLM.from_config(config).to(device)
    half = torch.autocast(device, torch.bfloat16, enabled=topology.model.dtype == "bfloat16")
    most = topology.train.max_tokens_per_gpu or MOST_TOKENS
    settings, algorithm = topology.optimizer, topology.algorithm
    clip = algorithm.loss
    assert isinstance(clip, PpoLoss)
    betas = (settings.adam_beta1, settings.adam_beta2)
    adam = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=betas, weight_decay=settings.weight_decay, fused=True
    )
    high = 1 + (clip.eps_clip if clip.eps_clip_high is None else clip.eps_clip_high)

    def train(batch: Any) -> None:
        advantages = grpo_advantages(batch.rewards_B, batch.groups_B, batch.rollouts_B)
        for samples in np.array_split(np.arange(len(batch.lengths_B)), algorithm.num_steps_per_rollout):
            adam.zero_grad()
            num_tokens = int(batch.mask_sums_B[samples].sum())
            for members in buckets(batch.lengths_B, samples, width, most):
                tokens, picked, columns = padded(batch, members)
                old, gain = (
                    torch.from_numpy(values)[columns].to(device)
                    for values in (batch.rollout_log_probs_N, batch.spread(advantages))
                )
                tokens, picked = tokens.to(device), picked.to(device)
                with half:
                    if head == "all":
                        logits = model(tokens[:, :-1], use_cache=False).logits[picked].float()
                    else:
                        hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
                        logits = model.lm_head(hidden[picked]).float()
                spread = (logits / topology.rollout.temperature).log_softmax(-1)
                log_probs = spread.gather(1, tokens[:, 1:][picked][:, None])[:, 0]
                ratio = (log_probs - old).exp()
                loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip.eps_clip, high) * gain)
                (loss.sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            adam.step()

    return train


def buckets(lengths: Any, samples: Any, width: int, most: int) -> Sequence[Any]:
    """Samples whose lengths, cut down to a multiple of the width, are equal; of so many tokens at most, padded."""
    import numpy as np

    which = lengths[samples] // width
    alike = [samples[which == one] for one in np.unique(which)]
    parts = [-(-len(members) * int(lengths[members].max()) // most) for members in alike]
    return [part for members, number in zip(alike, parts, strict=True) for part in np.array_split(members, number)]


def padded(batch: Any, members: Any) -> tuple[Any, Any, Any]:
    """Tokens [b, s], whether a position's next token trains [b, s - 1], and where those are in the columns."""
    import numpy as np
    import torch

    lengths, starts = batch.lengths_B[members], batch.starts_B[members]
    positions = np.arange(lengths.max())
    real = positions < lengths[:, None]
    columns = np.where(real, starts[:, None] + positions, 0)
    tokens = np.where(real, batch.tokens_N[columns], 0).astype(np.int64)
    picked = (real & (batch.loss_mask_N[columns] != 0))[:, 1:]
    return torch.from_numpy(tokens), torch.from_numpy(picked), torch.from_numpy(columns[:, 1:][picked])


if __name__ == "__main__":
    sys.exit(main())
