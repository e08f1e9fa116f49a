"""Which device runs the target, and what it can hold. The only file beside `parallel` that names CUDA."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from pathlib import Path

import torch

from specctl.errors import MachineError, UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def check_device(name: str, num_ranks: int = 1) -> bool:
    """Whether `name` (`auto`, `cpu`, `cuda`, `cuda:N`) means a GPU; touches none.

    Raises UsageError for a name torch does not know, MachineError when this machine has fewer GPUs
    than `num_ranks` ranks need.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device("cpu" if name == "auto" and not count else name.replace("auto", "cuda"))
    except RuntimeError:
        raise UsageError(f"`--device {name}` is not a device", hint="one of auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"`--device {name}` is not supported", hint="one of auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return False
    needed = num_ranks if device.index is None else device.index + 1
    if needed > count:
        raise MachineError(
            f"`--device {name}` needs {needed} GPUs here and this machine has {count}",
            hint="fewer ranks, or `--device cpu`",
        )
    return True


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; `auto` and `cuda` give each local rank a GPU of its own.

    Raises what `check_device` raises.
    """
    if not check_device(name, local_rank + 1):
        return torch.device("cpu")
    index = torch.device(name.replace("auto", "cuda")).index
    device = torch.device("cuda", local_rank if index is None else index)
    torch.cuda.set_device(device)
    return device


def is_gpu(device: torch.device) -> bool:
    """Whether copies to the host are worth making asynchronous."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_held(device: torch.device) -> int:
    """Bytes of this process's own memory: the most so far on a GPU, those of now on a CPU.

    Mapped files do not count: shards stay in the system's cache, which takes them back at need.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
    except (OSError, StopIteration, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def distributed_backend(device: torch.device) -> str:
    """The process-group backend that carries tensors of `device`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def release_host_memory() -> None:
    """Give freed host memory back to the system, where the C library can (glibc).

    Batches of ever new shapes fragment its heap: 100 MiB after 40 batches of SmolLM2, which
    this takes back.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_mapped(tensor: torch.Tensor) -> None:
    """Give back the memory of a tensor that is mapped from a file and was never written; it is read again at need."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    dont_need = getattr(mmap, "MADV_DONTNEED", None)
    if advise is None or dont_need is None or tensor.device.type != "cpu":
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), dont_need)
