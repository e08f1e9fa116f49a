"""The training step of speculators 0.9.0, run by benchmarks/train.py inside that package's own environment.

Their model, forward, loss and optimizer as their trainer calls them, without the trainer, which moves all
to a GPU. On a CPU their attention is `sdpa` (flex attention has no backward there) and their loss `eager`
(the fused one is Triton). They train no draft head: variant `own` leaves it so, `head` trains it too.

What both sides share stands here as well, so that it is the same code: sizes, weights, batch, optimizer
and clock. Nothing of specctl is imported.

Source: vllm-project/speculators v0.9.0, models/eagle3/core.py, models/peagle/core.py, train/trainer.py.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
VOCAB, DRAFT_VOCAB, RESERVED_ID = 49_152, 8_192, 4
AUX_IDS, EPS, ROPE = (2, 15, 27), 1e-5, {"rope_type": "default", "rope_theta": 1e5}
COD_RATIO, COD_FLOOR = 0.7, 0.2

Step = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Forward and backward of one step: mean loss of an element in nats, and elements scored at each depth."""
Update = Callable[[], None]
"""Gradients to new weights, and no gradients left."""
LR = 1e-4


@dataclass(frozen=True)
class Run:
    """What one process measures; `document` is the length of each document and divides `tokens`."""

    algorithm: str
    dtype: str
    variant: str
    depths: int
    tokens: int = 512
    document: int = 512
    warmup: int = 2
    steps: int = 5


@dataclass(frozen=True)
class Batch:
    """One row of T tokens: int64 and bool [T], the aux states [T, 3H] and the last [T, H] before the final norm."""

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor


def make_batch(run: Run) -> Batch:
    """Random tokens and states; the last three quarters of each document are supervised."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(run.tokens // run.document, run.document, dtype=torch.bool)
    mask[:, : run.document // 4] = False
    ids = torch.randint(0, VOCAB, (run.tokens,), generator=generator)
    aux, final = (torch.randn(run.tokens, width * HIDDEN, generator=generator) for width in (3, 1))
    dtype = getattr(torch, run.dtype)
    return Batch(ids, mask.reshape(-1), aux.to(dtype), final.to(dtype))


def draft_ids() -> torch.Tensor:
    """The draft vocabulary, rising, int64 [W]."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:DRAFT_VOCAB].sort().values


@torch.no_grad()
def fill(tensor: torch.Tensor, name: str, std: float = 0.02) -> torch.Tensor:
    """`tensor` with the weights that belong to `name` on either side."""
    return tensor.normal_(0.0, std, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def fill_model(model: torch.nn.Module) -> None:
    """The same weights for all matrices of both models; norms are ones in both."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.startswith("verifier"):
            fill(parameter, name)


def target_head() -> torch.Tensor:
    """The target's head, fp32 [V, H]."""
    return fill(torch.empty(VOCAB, HIDDEN), "target", 0.05)


def autocast(run: Run) -> torch.autocast:
    """bfloat16 over fp32 weights, or nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=run.dtype == "bfloat16")


def peak_mib() -> float:
    """The peak of this process's resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def adamw_update(model: torch.nn.Module) -> Update:
    """Clip to 1, AdamW, no gradients left."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def measured(run: Run, step: Step, update: Update) -> dict[str, Any]:
    """CPU seconds of the fastest step with its update, its forward and backward alone, and memory."""
    built, first, times = peak_mib(), None, []
    for number in range(run.warmup + run.steps):
        began = time.process_time()
        found = step(number)
        passed = time.process_time()
        update()
        times.append((time.process_time() - began, passed - began))
        first = first or found
    assert first is not None
    best = min(times[run.warmup :])
    return {
        "seconds": best[0],
        "passes": min(passes for _, passes in times[run.warmup :]),
        "built": built,
        "peak": peak_mib(),
        "loss": float(first[0]),
        "elements": first[1].long().tolist(),
    }


def their_model(run: Run) -> Any:
    """Their draft of one Llama layer, its weights filled."""
    from speculators import models
    from transformers import LlamaConfig

    layer = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        rms_norm_eps=EPS,
        rope_parameters=ROPE,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    shared = {
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(AUX_IDS),
    }
    if run.algorithm == "eagle3":
        model: Any = models.Eagle3DraftModel(models.Eagle3SpeculatorConfig(**shared))
    else:
        model = models.PEagleDraftModel(models.PEagleSpeculatorConfig(**shared, mask_token_id=RESERVED_ID))
    fill_model(model)
    with torch.no_grad():
        model.verifier_lm_head.weight.copy_(target_head()[draft_ids()])
    model.lm_head.weight.requires_grad_(run.variant == "head")
    return model.train()


def their_arguments(run: Run) -> dict[str, Any]:
    """What their trainer passes to forward: the batch, shifted as they do, and the settings."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch

    batch = make_batch(run)
    # They score a slot by the mask of the token that enters it, specctl by that of the token it predicts.
    mask = torch.cat((batch.mask[1:], batch.mask.new_zeros(1)))
    row = {
        "input_ids": batch.ids,
        "hidden_states": batch.aux,
        "verifier_last_hidden_states": batch.final,
        "loss_mask": mask,
        "lengths": torch.tensor([run.tokens]),
        "position_ids": torch.arange(run.tokens),
    }
    row = {name: tensor[None] for name, tensor in shift_batch(row).items() if name != "lengths"}
    row["document_ids"] = torch.zeros_like(row["input_ids"])
    settings: dict[str, Any] = {"ttt_steps": run.depths, "ttt_step_loss_decay": 1.0}
    if run.algorithm == "peagle":
        settings = {"num_depths": run.depths, "down_sample_ratio": COD_RATIO, "down_sample_ratio_min": COD_FLOOR}
    return {**row, **settings, "loss_config": resolve_loss_config("kl_div", "eager")}


def their_step(run: Run) -> tuple[torch.nn.Module, Step]:
    """Their model and its step."""
    model, arguments = their_model(run), their_arguments(run)
    is_eagle3 = run.algorithm == "eagle3"
    name = "full_acc_{}_total" if is_eagle3 else "position_{}_acc_total"

    def step(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast(run):
            _, loss, metrics = model(**arguments)
        loss.backward()
        elements = torch.stack([torch.as_tensor(metrics[name.format(d)]) for d in range(run.depths)])
        # EAGLE-3's loss is the sum of the means of its steps.
        return loss.detach() / (run.depths if is_eagle3 else 1), elements

    return model, step


def main() -> int:
    """Measure the run that the first argument says in JSON, print the result as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run(**json.loads(sys.argv[1]))
    assert run.document == run.tokens, "one document"
    model, step = their_step(run)
    print(json.dumps(measured(run, step, adamw_update(model))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
