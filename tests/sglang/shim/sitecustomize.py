"""For SGLang on the CPU, in tests: what SGLang takes for granted of torch, where there is no GPU.

- torchvision on PyPI is a CUDA build, so beside a CPU build of torch its C extension does not load, and
  `torchvision::{nms,qnms}` are missing. This declares their schema.
- In a CUDA build `torch.get_device_module()` is `torch.cuda` with or without a GPU. SGLang 0.5.23 calls its
  `synchronize` when it releases memory, also with `--device cpu`, which would end the server. Here it is `torch.cpu`.
"""

import sys


class _TV:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                declare_operators(torch)
            else:
                use_the_cpu(torch)
        return None


def declare_operators(torch):
    sys._tv_lib = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        sys._tv_lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def use_the_cpu(torch):
    module_of = torch.get_device_module
    torch.get_device_module = lambda device=None: torch.cpu if device is None else module_of(device)


sys.meta_path.insert(0, _TV())
