"""A train step with a KL loss: log-probs of the reference and the old policy by batch, by group, and computed ahead.

Run: python -m tests.bench.bench_ahead. CPU seconds of one thread, in turns; prints JSON. Ahead is all but the last
group, whose end is the end of the wait for the batch.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.actors.trainer.tiny import groups_of
from tests.bench.bench_trainer import random_batch as laptop_batch
from tests.bench.bench_transformers import MODEL, TABLES, ragged_batch
from tests.bench.rig import rounded

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY: Final = 4096
ALGORITHM: Final = {"use_rollout_logprobs": False, "kl": {"type": "k1", "loss_coef": 0.1}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turns")
    parser.add_argument("--steps", type=int, default=5, help="train steps of a run")
    parser.add_argument("--groups", type=int, default=8, help="of a batch of hidden 256, with 4 samples of 128 tokens")
    parser.add_argument("--optimizer-steps", type=int, default=2, help="of a train step")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    print(json.dumps({name: measure(name, args) for name in args.case or CASES}, indent=2))
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds for a train step by way, and for what is computed before it."""
    from actors.trainer.commands import TrainerRank

    with tempfile.TemporaryDirectory() as folder:
        make, batches = CASES[name](Path(folder), args)
        by_batch, by_group = (TrainerRank(make(ahead), Path(folder)) for ahead in (False, True))
        seconds: dict[str, list[float]] = {}
        for run in range(args.runs + 1):
            for batch in batches if run else batches[:1]:  # the first run warms up
                for way, took_s in (
                    ("by_batch", cpu_s(lambda batch=batch: by_batch.train(batch))),
                    ("by_group", cpu_s(lambda batch=batch: by_group.train(batch))),
                    *ahead(by_group, batch),
                ):
                    seconds.setdefault(way, []).append(took_s)
        by_group.close()
    medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    return {
        "groups": len(set(batches[0].groups_B.tolist())),
        "tokens": statistics.mean(len(batch.tokens_N) for batch in batches),
        "cpu_s_per_step": rounded(medians),
        "by_batch_over_ahead": round(medians["by_batch"] / medians["ahead"], 3),
        "by_batch_over_by_group": round(medians["by_batch"] / medians["by_group"], 3),
    }


def ahead(engine: Any, batch: Any) -> Iterator[tuple[str, float]]:
    """What is computed before a train step, and the step."""
    from actors.trainer.data.precomputed import PrecomputedLogProbs

    precomputed, groups = PrecomputedLogProbs(), list(groups_of(batch))
    begin = time.process_time()
    for seq, alone in groups[:-1]:
        precomputed.add(seq, engine.log_probs(alone))
    yield "before_ahead", time.process_time() - begin
    seqs = {group: group for group, _ in groups}
    yield "ahead", cpu_s(lambda: engine.train(precomputed.put_into(batch, seqs)[0]))


def cpu_s(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


Case = tuple[Callable[[bool], Any], list[Any]]  # the topology, with or without log-probs ahead, and batches


def laptop(folder: Path, args: argparse.Namespace) -> Case:
    """The laptop recipe's model and sizes."""
    from msgspec.structs import replace

    from runtime.settings.load import load_topology

    del folder
    topology = load_topology(ROOT / "topologies" / "laptop.toml").topology
    algorithm = replace(topology.algorithm, **ALGORITHM, num_steps_per_rollout=args.optimizer_steps)

    def make(goes_ahead: bool) -> Any:
        trainer = replace(topology.trainer, log_probs_ahead=goes_ahead)
        return replace(topology, algorithm=algorithm, trainer=trainer)

    return make, [laptop_batch(step, topology.rollout.rollout_batch_size) for step in range(args.steps)]


def hidden_256(folder: Path, args: argparse.Namespace) -> Case:
    """Hidden 256, 4 layers; groups of 4 samples of 64 to 192 tokens, of which half train."""
    import msgspec

    from runtime.settings.topology import Topology

    (folder / "config.json").write_text(json.dumps(MODEL | {"vocab_size": VOCABULARY}))

    def make(goes_ahead: bool) -> Any:
        tables = TABLES | {
            "model": {"hf_checkpoint": str(folder), "random_init": True},
            "trainer": {"device": "cpu", "log_probs_ahead": goes_ahead},
            "algorithm": ALGORITHM | {"num_steps_per_rollout": args.optimizer_steps},
            "train": {"num_steps": args.steps},
        }
        return msgspec.convert(tables, Topology)

    return make, [ragged_batch(step, VOCABULARY, 0.5, pairs=2 * args.groups) for step in range(args.steps)]


CASES: dict[str, Callable[[Path, argparse.Namespace], Case]] = {"hidden_256": hidden_256, "laptop": laptop}


if __name__ == "__main__":
    sys.exit(main())
