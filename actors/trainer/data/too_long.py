"""Length limit of samples. Checks the lengths in events, before any payload is fetched."""

from dataclasses import dataclass
from typing import Self

from messages import GroupCompleted, SampleSummary
from runtime.process.actor import InputError
from runtime.settings.placement import max_sample_tokens
from runtime.settings.topology import Topology

SamplePlace = tuple[int, int]  # index and part of a sample in its group


@dataclass(frozen=True, kw_only=True)
class LengthLimit:
    """Longest allowed sample, and the action for a longer one."""

    max_tokens: int | None = None  # None: any length
    ends: bool = False  # True: a longer sample ends the run; False: it is masked

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """Read the limit from the topology."""
        return cls(max_tokens=max_sample_tokens(topology), ends=topology.train.on_too_long == "fail")

    def too_long(self, completed: GroupCompleted) -> frozenset[SamplePlace]:
        """Return the samples of a group that exceed the limit."""
        if self.max_tokens is None:
            return frozenset()
        long = (sample for sample in completed.samples if length_of(sample) > self.max_tokens)
        return frozenset((sample.index, sample.part) for sample in long)

    def check(self, completed: GroupCompleted) -> None:
        """Raise InputError if a sample exceeds the limit and the setting ends the run."""
        if not self.ends:
            return
        for index, part in sorted(self.too_long(completed)):
            sample = next(sample for sample in completed.samples if (sample.index, sample.part) == (index, part))
            raise InputError(
                f"sample {index} of group {completed.group_id} has {length_of(sample)} tokens; {self.max_tokens} fit "
                "(train.max_tokens_per_gpu x trainer.megatron.context_parallel_size): raise it, lower "
                'rollout.max_response_len, or set train.on_too_long = "mask"'
            )


def length_of(sample: SampleSummary) -> int:
    """Tokens of prompt and response, as the events report them."""
    return sample.prompt_len + sample.response_len
