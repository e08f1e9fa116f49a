"""Which device runs the target, and what it can hold. The only file beside `parallel` that names CUDA."""

from __future__ import annotations

import torch

from specctl.errors import MachineError, UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name` (`auto`, `cpu`, `cuda`, `cuda:N`).

    `auto` and `cuda` give each local rank a GPU of its own. Raises UsageError for a name torch does
    not know, MachineError when this machine lacks the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"`--device {name}` is not a device", hint="one of auto, cpu, cuda, cuda:N") from None
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else local_rank
    if index >= count:
        raise MachineError(
            f"`{name}` needs GPU {index} and this machine has {count}",
            hint="fewer ranks, or `--device cpu`",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def is_gpu(device: torch.device) -> bool:
    """Whether copies to the host are worth making asynchronous."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distributed_backend(device: torch.device) -> str:
    """The process-group backend that carries tensors of `device`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
