"""For SGLang on the CPU, in tests: what SGLang takes for granted of torch, where there is no GPU.

- torchvision on PyPI is a CUDA build, so beside a CPU build of torch its C extension does not load, and
  `torchvision::{nms,qnms}` are missing. This declares their schema.
- In a CUDA build `torch.get_device_module()` is `torch.cuda` with or without a GPU. SGLang 0.5.23 calls its
  `synchronize` when it releases memory, also with `--device cpu`, which would end the server. Here it is `torch.cpu`.
- A CPU build of torch cannot pin memory. SGLang 0.5.23 wants LoRA adapters pinned, which would end the server. Here
  `pin_memory` has no effect.
"""

import sys


class _TV:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                declare_operators(torch)
                ignore_pinning(torch)
            else:
                use_the_cpu(torch)
        return None


def declare_operators(torch):
    sys._tv_lib = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        sys._tv_lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def ignore_pinning(torch):
    def without(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_args, **_options: tensor


def use_the_cpu(torch):
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else module_of(device)


sys.meta_path.insert(0, _TV())
