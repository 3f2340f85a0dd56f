"""Calls users' functions that compute metrics from all samples of an evaluation set.

A failure costs these metrics alone: the evaluation ends with the others, and with the reason.
"""

import numbers
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import anyio
import msgspec
import structlog
from anyio import to_thread

from messages import EvalEnded, Prompt
from messages.plain import clipped
from runtime.functions.child import UserFunctionError, UserProcess
from runtime.functions.limits import UserLimits
from runtime.functions.load import load
from runtime.functions.table import METRICS
from runtime.ledger.fold import Evaluation
from runtime.settings.derived import limits_of
from runtime.settings.sizes import MAX_OWN_METRICS
from runtime.settings.topology import Topology

log = structlog.get_logger()

MAX_REASON_CHARS: Final = 500
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
KEY: Final = "eval.N.custom_metrics"  # of a function that is tried without a recipe


class EvalSample(msgspec.Struct, frozen=True, kw_only=True):
    """A graded sample of an evaluation set, as a function of metrics sees it."""

    item: int  # number of the prompt in the set, from 0
    index: int  # of the sample, of its prompt
    part: int  # of its fan-out siblings
    prompt: str
    label: Any
    metadata: dict[str, Any]  # of the row
    status: str
    response_len: int  # tokens
    reward: float | None  # None: it has no grade
    score: dict[str, Any] | None  # the grader's answer, if it was more than a number
    sample_metadata: dict[str, Any]  # set by a generate function


class MetricsError(ValueError):
    """A function of metrics gave an invalid answer."""


class EvalMetrics:
    """Calls the functions of metrics of a recipe, each in a process of its own that a call without an end costs.

    Args:
        topology: the topology, with its recipe.
        show: called with the setting and the traceback when a user's function raises.
        timeout_s: maximum seconds for one call.
    """

    def __init__(
        self,
        topology: Topology,
        show: Callable[[str, str], Awaitable[object]] | None = None,
        *,
        timeout_s: float = METRICS.timeout_s,
    ) -> None:
        self._keys = {item.name: f"eval.{index}.custom_metrics" for index, item in enumerate(topology.eval)}
        self._processes = {
            item.name: UserProcess(METRICS, self._keys[item.name], item.custom_metrics, limits_of(topology.reward))
            for item in topology.eval
            if item.custom_metrics is not None
        }
        self._show = show
        self._timeout_s = timeout_s
        self._of_step: tuple[int, dict[str, float], dict[str, str]] | None = None  # newest step; metrics, reasons

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ValueError: a function cannot be used.
        """
        for process in self._processes.values():
            await process.start()

    async def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            await process.kill()

    async def added(
        self, ended: EvalEnded, evaluation: Evaluation, prompts: Mapping[str, Sequence[Prompt]]
    ) -> EvalEnded:
        """Return the end of an evaluation with the metrics of the functions, and the reasons of those that failed.

        Each function is called once, also if the end is not appended and decided again.

        Args:
            ended: with the other metrics.
            evaluation: which is complete.
            prompts: of each set.
        """
        if self._of_step is None or self._of_step[0] != ended.step:
            self._of_step = (ended.step, *await self._computed(evaluation, prompts))
        _, metrics, failed = self._of_step
        return msgspec.structs.replace(ended, metrics=ended.metrics | metrics, failed=failed | ended.failed)

    async def _computed(
        self, evaluation: Evaluation, prompts: Mapping[str, Sequence[Prompt]]
    ) -> tuple[dict[str, float], dict[str, str]]:
        metrics, failed = dict[str, float](), dict[str, str]()
        for name, process in self._processes.items():
            if name not in evaluation.sizes or name in evaluation.failed:
                continue
            try:
                found = await self._call(process, evaluation, name, prompts[name])
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the run continues
                reason = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                log.warning("eval_metrics_failed", set=name, step=evaluation.step, reason=reason)
                if isinstance(error, UserFunctionError) and self._show is not None:
                    await self._show(self._keys[name], error.traceback)
                failed[name] = clipped(f"{self._keys[name]}: {reason}", MAX_REASON_CHARS)
            else:
                metrics |= {f"eval/{name}/{metric}": value for metric, value in found.items()}
        return metrics, failed

    async def _call(
        self, process: UserProcess, evaluation: Evaluation, name: str, prompts: Sequence[Prompt]
    ) -> dict[str, float]:
        if name not in evaluation.kept:
            raise MetricsError("the evaluation began without this function, so its samples were not kept")
        if cut := sum(item.is_cut for item in evaluation.items[name].values()):
            log.warning("eval_details_left_out", set=name, step=evaluation.step, num_items=cut)
        with anyio.fail_after(self._timeout_s):
            samples = await to_thread.run_sync(_packed, evaluation, name, prompts, abandon_on_cancel=True)
        return admitted(msgspec.msgpack.decode(await process.call(samples, timeout_s=self._timeout_s)))


def samples_of(evaluation: Evaluation, name: str, prompts: Sequence[Prompt]) -> list[EvalSample]:
    """The samples of a set in the order of its rows. An item whose samples are lost has none."""
    return [
        EvalSample(
            item=number,
            index=sample.index,
            part=sample.part,
            prompt=prompts[number].text,
            label=prompts[number].label,
            metadata=prompts[number].metadata,
            status=sample.status,
            response_len=sample.response_len,
            reward=sample.reward,
            score=sample.score,
            sample_metadata=sample.metadata,
        )
        for number, item in sorted(evaluation.items[name].items())
        for sample in item.samples
    ]


def _packed(evaluation: Evaluation, name: str, prompts: Sequence[Prompt]) -> bytes:
    return msgspec.msgpack.encode(samples_of(evaluation, name, prompts))


def admitted(answer: object) -> dict[str, float]:
    """Check an answer of a user's function.

    Raises:
        MetricsError: it is not a dictionary of finite numbers by name.
    """
    if not isinstance(answer, Mapping):
        raise MetricsError(f"returned {answer!r:.200}; expected a dictionary of numbers by name")
    named = cast("Mapping[object, object]", answer)
    if len(named) > MAX_OWN_METRICS:
        raise MetricsError(f"returned {len(named)} metrics; at most {MAX_OWN_METRICS} are allowed")
    metrics: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            allowed = "1 to 64 of A-Z, a-z, 0-9, _, . and -, not beginning with . or -"
            raise MetricsError(f"returned a metric named {name!r:.120}; allowed: {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise MetricsError(f"its metric {name} is {value!r:.120}; expected a finite number")
        metrics[name] = float(value)
    return metrics


def _is_finite(value: float) -> bool:
    return abs(value) <= 1e308  # an integer may be too large for a float; false for NaN


async def try_metrics(name: str, samples: Sequence[EvalSample]) -> dict[str, float]:
    """Call a user's function in a process of its own, as a run does.

    Raises:
        UserProcessError: the process ended.
        UserFunctionError: the function raised.
        TimeoutError: it took too long.
        MetricsError: its answer is invalid.
        ValueError: it cannot be used.
    """
    process = UserProcess(METRICS, KEY, name, UserLimits())
    try:
        answer = await process.call(msgspec.msgpack.encode(samples), timeout_s=METRICS.timeout_s)
        return admitted(msgspec.msgpack.decode(answer))
    finally:
        await process.kill()


def answering(key: str, name: str) -> Callable[[bytes], bytes]:
    """Return a user's function as its process calls it: from packed samples to what it returned, packed.

    Raises:
        ValueError: the function cannot be used.
    """
    function, decoder = load(METRICS, key, name).function, msgspec.msgpack.Decoder(list[EvalSample])
    return lambda payload: msgspec.msgpack.encode(function(decoder.decode(payload)), enc_hook=_plain)


def _plain(value: object) -> object:
    """Convert a number of numpy; other values that a message cannot hold are sent as they are shown."""
    return float(value) if isinstance(value, numbers.Real) else f"{value!r:.120}"
