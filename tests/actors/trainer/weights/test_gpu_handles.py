"""Buckets by handles to engines on the trainer's GPUs: who makes which, and two ranks on the CPU with what stands in.

What a handle is only a GPU can show (tests/gpu, `ipc`): here it is replaced by the bytes and the rank that made it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.trainer.weights.gpu_handles import ranks_at_engines
from runtime.settings.load import load_topology

ROOT = Path(__file__).parents[4]
COLOCATE = ROOT / "topologies" / "colocate-8gpu.toml"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ("engines.policy.num_gpus_per_engine=4",),
            {"engine.policy.0": (0, 1, 2, 3), "engine.policy.1": (4, 5, 6, 7)},
        ),
        (
            # The trainer has four GPUs, in the order of the node; one engine has the last three, given backwards.
            (
                "trainer.gpus=n0:2-5",
                'engines.policy.gpus="n0:5,4,3"',
                "engines.policy.num_gpus_per_engine=3",
            ),
            {"engine.policy.0": (1, 2, 3)},
        ),
        (
            ("trainer.gpus=n0:0-1", "engines.policy.gpus=n0:0-1"),
            {"engine.policy.0": (0,), "engine.policy.1": (1,)},
        ),
    ],
)
def test_an_engine_reads_on_each_gpu_what_the_rank_there_has(
    settings: tuple[str, ...], expected: dict[str, tuple[int, ...]]
) -> None:
    assert ranks_at_engines(load_topology(COLOCATE, settings).topology) == expected


RANK = """
import base64, json, os, pickle, sys
from concurrent.futures import Future
from pathlib import Path
import torch
import torch.distributed as dist
from actors.trainer.weights import gpu_handles as handles
from actors.trainer.weights.cast import FORMS
from actors.trainer.weights.shared_memory import PickledCall

store = sys.argv[1]
child = os.fork()  # what was imported, in seconds of a core, is imported once
rank = 0 if child else 1
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
handles.handle_of = lambda flat: PickledCall(tuple, (rank, flat.numpy().tobytes()))

def run(case, form, y):
    taken = []

    def ask(step, timeout_s):
        for engine, payloads in step.payloads.items():
            for bucket in [pickle.loads(base64.b64decode(payload)) for payload in payloads]:
                made_by, data = bucket["flattened_tensor"]
                flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for meta in bucket["metadata"]:
                    tensor = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
                    told = [made_by, meta.name, str(tensor.dtype), tensor.tolist()]
                    taken.append([step.stage, step.index, engine, *told])
        answer = Future()
        answer.set_result({"b": "it is tired"} if case == "tired" and step.index == 1 else {})
        return answer

    own = [[("z", torch.tensor([5.0]))]]
    if rank == 0:
        two = [("x", torch.tensor([[1.0, 2.0]])), ("h", torch.tensor([3.0], dtype=torch.bfloat16))]
        own = [two, [("y", torch.tensor([y]))]]
    sender = handles.HandleSender(
        "1.1",
        {"a": 1, "b": 2},
        {"a": (1,), "b": (0, 1), "c": (0,)},
        ask,
        device=torch.device("cpu"),
        fingerprints=form == "as_trained",
        timeout_s=5.0,
    )
    sent = sender.send(iter(own), FORMS[form], stage=rank, firsts=[0, 1])
    return [taken, sent.num_buckets, sent.size_bytes, sorted(sent.fingerprints), sent.failed]

found = {
    "plain": run("", "as_trained", 4.0),
    "half": run("", "bfloat16", 4.0),
    "tired": run("tired", "as_trained", 4.0),
    "wrong": run("", "bfloat16", float("nan")),
}
dist.barrier()
Path(f"{store}.{rank}").write_text(json.dumps(found))
dist.destroy_process_group()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

TwoRanks = dict[str, list[list[Any]]]  # what each rank had engines take, and says that it sent, by the case


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two ranks, each a stage of its own."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, "-c", RANK, str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads(store.with_suffix(f".{rank}").read_text()) for rank in range(2))
    return {case: [first[case], second[case]] for case in first}


def test_every_engine_gets_every_bucket_of_every_stage_from_the_rank_on_its_gpu(two_ranks: TwoRanks) -> None:
    first, second = two_ranks["plain"]
    makers = [("a", 1), ("b", 0), ("b", 1)]
    assert first[0] == [
        [0, index, engine, rank, *tensor]
        for index, bucket in enumerate(
            [[("x", "torch.float32", [[1.0, 2.0]]), ("h", "torch.bfloat16", [3.0])], [("y", "torch.float32", [4.0])]]
        )
        for engine, rank in makers
        for tensor in bucket
    ]
    assert second[0] == [[1, 0, engine, rank, "z", "torch.float32", [5.0]] for engine, rank in makers]
    assert first[1:] == [2, 14, ["h", "x", "y"], {}]
    assert second[1:] == [1, 4, ["z"], {}]


def test_buckets_go_in_the_form_that_is_asked_for(two_ranks: TwoRanks) -> None:
    first, _ = two_ranks["half"]
    assert {tensor[5] for tensor in first[0]} == {"torch.bfloat16"}
    assert first[2] == 8


def test_an_engine_that_did_not_take_a_bucket_ends_it_on_all_ranks(two_ranks: TwoRanks) -> None:
    first, second = two_ranks["tired"]
    assert (first[1], first[4]) == (2, {"b": "bucket 1: it is tired"})
    assert second == [[], 0, 0, [], {}]


def test_numbers_that_a_form_has_not_end_it_on_all_ranks(two_ranks: TwoRanks) -> None:
    first, second = two_ranks["wrong"]
    assert first[1] == 1
    assert list(first[4]) == [""]
    assert first[4][""].startswith("y [1]: 1 of its numbers are not finite")
    assert second == [[], 0, 0, [], {}]
