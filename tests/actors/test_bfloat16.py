"""Products of bfloat16 matrices on processors without instructions for them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.trainer.algorithms.log_probs import log_probs_and_entropy

ROOT = Path(__file__).parents[2]
COMPARED = """
import sys
from pathlib import Path
import torch
from torch.nn import functional as F
from actors.bfloat16 import multiply_in_float32
from runtime.models import dtypes

dtypes.CPU_INFO = Path(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)


def drawn(*shape):
    return torch.randn(shape)


PRODUCTS = {  # the product, the shapes of its operands
    "mm": (lambda a, b: a @ b, (5, 7), (7, 3)),
    "transposed": (lambda a, b: a @ b.t(), (5, 7), (3, 7)),
    "linear": (lambda a, b: F.linear(a, b), (2, 5, 7), (3, 7)),
    "bias": (lambda a, b, c: F.linear(a, b, c), (5, 7), (3, 7), (3,)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), (5, 3), (5, 7), (7, 3)),
    "without": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (5, 3), (5, 7), (7, 3)),
    "bmm": (lambda a, b: torch.bmm(a, b), (2, 5, 7), (2, 7, 3)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), (2, 5, 3), (2, 5, 7), (2, 7, 3)),
    "empty": (lambda a, b: a @ b, (0, 7), (7, 3)),
}


def outcome(name, dtype, compute):
    # The product and the gradients of its operands, computed in one dtype from values of another.
    product, *shapes = PRODUCTS[name]
    torch.manual_seed(1)
    operands = [drawn(*shape).to(dtype).to(compute).requires_grad_() for shape in shapes]
    out = product(*operands)
    gradients = torch.autograd.grad((out.float() * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum(), operands)
    with torch.inference_mode():
        assert torch.equal(product(*operands), out)
    return [each.to(dtype) for each in (out.detach(), *gradients)]


print(multiply_in_float32(), multiply_in_float32())
for mixed in (lambda a, b: a.bfloat16() @ b, lambda a, b: torch.addmm(torch.zeros(3), a.bfloat16(), b.bfloat16())):
    try:
        mixed(drawn(5, 7), drawn(7, 3))
    except RuntimeError:
        pass  # as torch refuses them everywhere
    else:
        raise AssertionError("operands of two dtypes were multiplied")
for name in PRODUCTS:
    before = outcome(name, torch.float64, torch.float64)
    exact = outcome(name, torch.bfloat16, torch.float64)
    ours = outcome(name, torch.bfloat16, torch.bfloat16)
    for mine, right in zip(ours, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        torch.testing.assert_close(mine, right, rtol=2**-7, atol=0.05)
    assert torch.equal(ours[0], exact[0]), name  # rounded once, from float32
    for mine, right in zip(outcome(name, torch.float32, torch.float32), before, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-3)
"""


class Products(TorchDispatchMode):
    """Note the kernels that multiply matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.called = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in (name := str(func)):
            self.called.add(name)
        return func(*args, **(kwargs or {}))


def test_log_probs_are_computed_by_kernels_that_are_replaced() -> None:
    """A product in bfloat16 that wrote into a given tensor took nine tenths of a train step on AVX2."""
    hidden, weight = (torch.zeros(rows, 4, dtype=torch.bfloat16, requires_grad=True) for rows in (6, 9))
    with Products() as products:
        log_probs, _ = log_probs_and_entropy(hidden, weight, torch.zeros(6, dtype=torch.int64))
        log_probs.sum().backward()
    assert products.called == {"aten.mm.default"}


@pytest.mark.parametrize(("features", "replaced"), [("fpu avx2", True), ("fpu avx2 avx512_bf16", False)])
def test_products_are_rounded_once_whatever_the_processor(features: str, replaced: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {features}\n")
    words = [sys.executable, "-c", COMPARED, str(tmp_path / "cpuinfo")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{replaced} {replaced}\n", "")
