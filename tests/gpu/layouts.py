"""The grid's rows of one rank on a device, padded and packed, against a rank of the CPU; bfloat16 against float32."""

import tempfile
from pathlib import Path
from typing import Final

from tests.gpu.measured import Measured
from tests.grid.rows import Row
from tests.grid.running import Job, Outcome, differences, outcome, train

TIMEOUT_S: Final = 120.0  # of half the steps of all rows
LIMITS: Final = {"loss": 1e-5, "entropy": 1e-5, "KL": 1e-5, "gradient norm": 2e-5, "weights": 5e-5, "moments": 1e-5}
HALF_LIMIT: Final = 2e-2  # of loss and entropy in bfloat16
ROWS: Final = tuple(
    Row("1", packed, recompute, tied)
    for packed in (False, True)
    for recompute in (False, True)
    for tied in (False, True)
)
HALVES: Final = tuple(Row("1", packed, tied=True, dtype="bfloat16") for packed in (False, True))


def layouts(device: str, *, tiny: bool = False) -> Measured:
    """Each row's largest differences, as in docs/results."""
    rows = (ROWS[4], HALVES[0]) if tiny else (*ROWS, *HALVES)
    baselines = {row.baseline for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        cpu, own = Path(folder) / "cpu", Path(folder) / "own"
        train(cpu, {Job(row): "second" for row in sorted(baselines, key=str)}, timeout_s=TIMEOUT_S)
        train(own, {Job(row): "second" for row in rows}, timeout_s=TIMEOUT_S, device=device)
        expected = {row: outcome(cpu, Job(row)) for row in baselines}
        return _compared({row: outcome(own, Job(row)) for row in rows}, expected)


def _compared(found: dict[Row, Outcome], expected: dict[Row, Outcome]) -> Measured:
    numbers: dict[str, dict[str, float]] = {}
    problems: list[str] = []
    for row, result in found.items():
        numbers[row.name] = differences(result, expected[row.baseline])
        limits = {"loss": HALF_LIMIT, "entropy": HALF_LIMIT} if row.is_half else LIMITS
        over = {name: value for name, value in numbers[row.name].items() if value > limits.get(name, float("inf"))}
        if over:
            problems.append(f"{row.name}: {over}")
    return Measured(numbers, problems)
