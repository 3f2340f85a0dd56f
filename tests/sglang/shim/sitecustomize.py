"""CPU-only test shim: PyPI torchvision is a CUDA build, so on torch+cpu its C
extension does not load and `torchvision::{nms,qnms}` are missing.  Declare the schema."""

import sys


class _TV:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            sys._tv_lib = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                sys._tv_lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _TV())
