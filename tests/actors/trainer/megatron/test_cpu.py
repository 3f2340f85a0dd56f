"""What Megatron-core asks of CUDA lands on the CPU, and nothing else is changed."""

import pytest
import torch
from torch.distributed import distributed_c10d


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 1)])
def test_what_is_made_on_a_gpu_is_on_the_cpu(device: object) -> None:
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.tensor([1.0, 2.0], device=device, pin_memory=True).tolist() == [1.0, 2.0]
    assert torch.empty_like(torch.ones(3), device=device).device.type == "cpu"


def test_tensors_on_a_gpu_are_those_of_the_cpu() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.bfloat16).dtype is torch.bfloat16
    assert torch.cuda.current_device() == torch.device("cpu")


def test_other_devices_are_what_they_were() -> None:
    """transformers makes its models in such a block."""
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert torch.zeros(3, device="cpu").device.type == "cpu"
    assert torch.zeros(3, device="meta").is_meta


def test_all_process_groups_share_the_devices_of_gloo() -> None:
    """Each device has a thread that wakes up 100 times a second."""
    groups = list(distributed_c10d._world.pg_map)
    devices = [device for group in groups for device in group._get_backend(torch.device("cpu")).options._devices]
    assert len(devices) == len(groups) > 20
    assert all(device is devices[0] for device in devices)
