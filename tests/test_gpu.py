"""What only a GPU can show. Skipped, with the reason, where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.make import make_tiny
from specctl.core.capture import Recorder, record
from specctl.core.target import describe_target, load_target
from specctl.recipes.extract import extract
from specctl.recipes.inspect import compare
from specctl.records.extraction import ExtractConfig
from specctl.records.progress import SilentReporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]


@pytest.mark.parametrize("family", ["llama", "gemma3", "hybrid"])
def test_a_gpu_stores_the_states_that_a_cpu_does(family: str, chats: Any, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for device in ("cpu", "cuda"):
        config = ExtractConfig(
            str(make_tiny(family)),
            (chats(12),),
            str(tmp_path / device),
            layers="all,norm",
            dtype="float32",
            device=device,
        )
        extract(config, SilentReporter())
    report = compare(str(tmp_path / "cpu"), str(tmp_path / "cuda"), SilentReporter())
    assert report.missing == 0
    assert all(slot.min_cosine > 1 - 1e-5 for slot in report.slots)


def test_a5_layer_zero_survives_the_replay_of_a_cuda_graph() -> None:
    """A5: the graph's own buffers are overwritten at each replay; what was recorded is not."""
    target = load_target(describe_target(str(make_tiny("llama"))), dtype="float32", device=torch.device("cuda", 0))
    recorder = Recorder()
    first, second = torch.arange(16, device="cuda").reshape(2, 1, 16 // 2)
    with torch.inference_mode(), record(target.decoder, ("0", "8"), recorder, model=target.model):
        target.decoder.caller(input_ids=first, use_cache=False)
        eager = recorder.take(("0", "8"), target.model)
        compiled = torch.compile(target.decoder.caller, mode="reduce-overhead")
        for ids in (first, second, first):
            compiled(input_ids=ids, use_cache=False)
            states = recorder.take(("0", "8"), target.model)
        kept = {slot: state.clone() for slot, state in states.items()}
        compiled(input_ids=second, use_cache=False)
    assert torch.equal(kept["0"], eager["0"])
    torch.testing.assert_close(kept["8"], eager["8"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [0, 1], ids=["eagle3", "peagle"])
def test_a_gpu_gives_the_gradients_of_the_cpu(number: int) -> None:
    """Flex attention, compiled, against the exact path."""
    from benchmarks.train_gpu import against_the_cpu, cases

    torch.backends.cuda.matmul.allow_tf32 = False
    assert against_the_cpu(cases(is_small=True)[number], torch.device("cuda", 0))
