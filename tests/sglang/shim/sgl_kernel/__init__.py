"""Import-only stand-in for the CUDA-only sgl_kernel wheel (CPU test runs), also where that is installed.

sglang binds a few `*_cpu` symbols at import time on a CPU device (speculative
decoding, KV moves).  With --attention-backend torch_native and no speculative
decoding none of them is called; calling one raises."""

__version__ = "0.0.0+cpu.stub"


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not available in this CPU stub")

    return missing
