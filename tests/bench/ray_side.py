"""Prompt groups from one Ray actor to another through the object store. Prints JSON.

Needs ray and numpy, nothing of ours, so that Ray can have an environment of its own: see bench_ray, which starts this.

Two ways are measured: the group as a task's return value whose reference the driver hands on, and the group put into
the store by the producer, which hands the reference on itself.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import ray

WAYS = ("returned", "put")
FORMS = ("lists", "numpy")


def group_of(form: str, num_samples: int, num_tokens: int, num_prompt: int) -> dict[str, Any]:
    """A group as a framework on Ray holds it: a dict per sample, its columns as lists or as arrays."""
    random = np.random.default_rng(1)
    length = num_tokens // num_samples
    response = length - num_prompt
    samples = []
    for index in range(num_samples):
        columns: dict[str, Any] = {
            "tokens": random.integers(0, 150_000, length).astype(np.int32),
            "rollout_log_probs": random.normal(size=response).astype(np.float32),
            "loss_mask": np.ones(response, np.uint8),
        }
        if form == "lists":
            columns = {name: column.tolist() for name, column in columns.items()}
        samples.append({"index": index, "reward": 1.0, "status": "completed", "weight_version": 1, **columns})
    return {"group_id": 0, "samples": samples}


@ray.remote
class Consumer:
    """Takes groups and says when it had each in its hands."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def take(self, group: dict[str, Any]) -> tuple[float, float]:
        assert sum(len(sample["tokens"]) for sample in group["samples"]) == self._num_tokens
        return group["begun"], time.monotonic()

    def take_reference(self, references: list[Any]) -> tuple[float, float]:
        return self.take(ray.get(references[0]))


@ray.remote
class Producer:
    """Has a group at hand and sends it again and again."""

    def __init__(self, consumer: Any, form: str, *sizes: int) -> None:
        self._consumer = consumer
        self._group = group_of(form, *sizes)

    def returned(self, number: int) -> dict[str, Any]:
        return {**self._group, "group_id": number, "begun": time.monotonic()}

    def put(self, number: int) -> list[Any]:
        reference = ray.put(self.returned(number))
        return [self._consumer.take_reference.remote([reference])]


class Line:
    """A producer and a consumer."""

    def __init__(self, form: str, *sizes: int) -> None:
        self._consumer = Consumer.remote(sum(sizes[1:2]))
        self._producer = Producer.remote(self._consumer, form, *sizes)

    def send(self, way: str, number: int) -> Any:
        """Start the way of one group; return what stands for its end."""
        if way == "returned":
            return self._consumer.take.remote(self._producer.returned.remote(number))
        return self._producer.put.remote(number)

    @staticmethod
    def end(sent: Any) -> tuple[float, float]:
        found = ray.get(sent)
        return ray.get(found[0]) if isinstance(found, list) else found

    def run(self, way: str, count: int, in_flight: int) -> list[tuple[float, float]]:
        """Begin and end of each of so many groups."""
        waiting, done = [], []
        for number in range(count):
            waiting.append(self.send(way, number))
            if len(waiting) >= in_flight:
                done.append(self.end(waiting.pop(0)))
        return done + [self.end(sent) for sent in waiting]


def measure(form: str, way: str, args: argparse.Namespace) -> dict[str, float]:
    line = Line(form, args.samples, args.tokens, args.prompt)
    line.run(way, 1 + args.groups // 10, args.in_flight)
    times = line.run(way, args.groups, args.in_flight)
    alone = line.run(way, args.latency_groups, 1)
    return {
        "groups_per_s": len(times) / (max(end for _, end in times) - min(begun for begun, _ in times)),
        "latency_ms": 1e3 * statistics.median(end - begun for begun, end in alone),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("groups", "latency-groups", "samples", "tokens", "prompt", "in-flight"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    found = {form: {way: measure(form, way, args) for way in WAYS} for form in FORMS}
    ray.shutdown()
    print(json.dumps({"version": ray.__version__, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
