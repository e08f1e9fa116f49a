"""Training steps on a GPU: tokens/s, MFU, peak memory, flex against sdpa, and gradients against the CPU.

Run it where torch sees a GPU: `python benchmarks/train_gpu.py`. States are random, of the sizes of a
Llama-3.1-8B: what is timed is the step, from states on the GPU to the new weights, in bf16 over fp32
masters. `--small --device cpu` runs the same lines anywhere, to see that they run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from specctl.core.attention import bind_flex
from specctl.core.attentionplan import Plan, plan_attention
from specctl.core.device import memory_held, synchronize
from specctl.core.losses import Teacher, make_teacher
from specctl.core.modules import DraftModel
from specctl.core.rowloader import moved
from specctl.drafts import eagle3, peagle
from specctl.records.draft import DraftBatch, DraftSettings, LossReport
from specctl.records.head import HeadConfig

GRADIENT_TOLERANCE = 2e-4
"""Of a parameter's largest gradient, fp32 without TF32."""


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm at one size."""

    name: str
    head: HeadConfig
    settings: DraftSettings
    tokens: int

    @property
    def training_loss(self) -> Callable[..., LossReport]:
        """The algorithm's loss."""
        return peagle.training_loss if self.head.parallel_drafting else eagle3.training_loss


def cases(*, is_small: bool) -> list[Case]:
    """EAGLE-3 of one layer with 3 steps, P-EAGLE of four with 8 tokens, as in docs/recipes."""
    sizes = (64, 128, 4, 2, 16, 512, 128) if is_small else (4096, 14336, 32, 8, 128, 128_256, 32_000)
    hidden, inner, heads, kv_heads, head_dim, vocab, draft_vocab = sizes
    head = HeadConfig(
        block="llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=hidden,
        num_aux=3,
        aux_ids=(2, 16, 29),
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope={"rope_type": "default", "rope_theta": 500_000.0},
        max_position_embeddings=131_072,
    )
    parallel = replace(head, num_hidden_layers=2 if is_small else 4, parallel_drafting=True, mask_token_id=3)
    tokens = 256 if is_small else 8192
    return [
        Case("eagle3", head, DraftSettings(3), tokens),
        Case("peagle", parallel, DraftSettings(8, cod_ratio=0.8, cod_floor=0.2), tokens),
    ]


def a_batch(head: HeadConfig, tokens: int, dtype: torch.dtype) -> DraftBatch:
    """Four documents, a quarter of each prompt."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(tokens, dtype=torch.uint8)
    bounds = tuple(range(0, tokens + 1, tokens // 4))
    for begin in bounds[:-1]:
        mask[begin : begin + tokens // 16] = 0
    return DraftBatch(
        torch.randint(4, head.vocab_size, (tokens,), generator=draw),
        bounds,
        mask,
        torch.randn(tokens, head.fc_width, generator=draw).to(dtype),
        torch.randn(tokens, head.target_hidden_size, generator=draw).to(dtype),
    )


def parts(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[DraftModel, Teacher]:
    """A fresh model and a random teacher."""
    head, draw = case.head, torch.Generator().manual_seed(1)
    model = DraftModel(head, generator=draw)
    ids = torch.randperm(head.vocab_size, generator=draw)[: head.draft_vocab_size].sort().values
    model.set_vocabulary(ids)
    model.embed_tokens.weight.requires_grad_(head.parallel_drafting)
    weight = torch.randn(head.vocab_size, head.target_hidden_size, generator=draw) * 0.02
    return model.to(device), make_teacher(weight.to(device, dtype), ids.to(device))


def timed(case: Case, device: torch.device, seconds: float, peak_tflops: float) -> None:
    """Train for `seconds` and print what a step costs."""
    model, teacher = parts(case, torch.bfloat16, device)
    batch = moved(a_batch(case.head, case.tokens, torch.bfloat16), device)
    batch = replace(batch, greedy_ids=teacher.greedy_ids(batch.final))  # the loader keeps them per sample
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step(number: int) -> float:
        with torch.autocast(device.type, torch.bfloat16):
            report = case.training_loss(
                model,
                batch,
                teacher=teacher,
                settings=case.settings,
                generator=torch.Generator().manual_seed(number),
            )
        (report.loss / report.weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(report.loss.detach() / report.weight)

    with FlopCounterMode(display=False) as counter:
        first = step(0)
    flops = counter.get_total_flops()
    step(1)
    synchronize(device)
    began, count, last = time.monotonic(), 0, first
    while time.monotonic() - began < seconds:
        last, count = step(count + 2), count + 1
    synchronize(device)
    each = (time.monotonic() - began) / count
    print(
        f"{case.name:7s} {case.tokens / each:10,.0f} tokens/s  {each * 1e3:8.1f} ms/step  "
        f"MFU {flops / each / peak_tflops / 1e12:6.1%} (without attention)  "
        f"peak {memory_held(device) / 2**30:5.1f} GiB  loss {first:.3f} -> {last:.3f}"
    )


def against_the_cpu(case: Case, device: torch.device) -> bool:
    """Loss and every gradient on `device` against the CPU path, in fp32."""
    small = replace(case, head=replace(case.head, num_hidden_layers=min(case.head.num_hidden_layers, 2)), tokens=256)
    worst, losses = 0.0, []
    gradients: list[dict[str, torch.Tensor]] = []
    for where in (torch.device("cpu"), device):
        model, teacher = parts(small, torch.float32, where)
        batch = moved(a_batch(small.head, small.tokens, torch.float32), where)
        report = small.training_loss(
            model, batch, teacher=teacher, settings=small.settings, generator=torch.Generator().manual_seed(0)
        )
        report.loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(report.loss.detach() / report.weight))
        gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        gap = float((gradients[1][name] - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        worst = max(worst, gap)
    is_same = worst <= GRADIENT_TOLERANCE and abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0])
    verdict = "equal" if is_same else "DIFFER"
    print(
        f"{case.name:7s} gradients against the CPU: {verdict}, largest difference {worst:.1e} of a parameter's largest"
    )
    return is_same


def flex_against_sdpa(case: Case, device: torch.device) -> None:
    """One attention of depths beyond zero, forward and backward: flex, and sdpa with its dense mask."""
    head, tokens, depth = case.head, case.tokens, case.settings.num_draft_tokens
    starts = (torch.arange(tokens, device=device) // (tokens // 4)) * (tokens // 4)
    anchors = torch.arange(0, tokens, 2, device=device).repeat_interleave(depth - 1)
    depths = torch.arange(1, depth, device=device).repeat(tokens // 2)
    plan = plan_attention(anchors, depths, starts_N=starts, own=(anchors, depths))
    shapes = [(len(anchors), head.num_attention_heads), *[(tokens + len(anchors), head.num_key_value_heads)] * 2]
    q, k, v = (torch.randn(*shape, head.head_dim, device=device, dtype=torch.bfloat16) for shape in shapes)
    mask = dense_mask(plan, tokens)
    bound = bind_flex(plan, None)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return bound(q, (k[:tokens], v[:tokens]), (k[tokens:], v[tokens:]))

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        wide = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    for name, call in (("flex", flex), ("sdpa", sdpa)):
        tensors = [x.clone().requires_grad_(device.type == "cuda") for x in (q, k, v)]
        best = float("inf")
        for _ in range(5):
            synchronize(device)
            began = time.monotonic()
            out = call(*tensors)
            if out.requires_grad:
                out.sum().backward()  # type: ignore[no-untyped-call]
            synchronize(device)
            best = min(best, time.monotonic() - began)
        print(f"{case.name:7s} attention of {len(anchors):,} elements over {tokens:,}: {name} {best * 1e3:.1f} ms")


def dense_mask(plan: Plan, num_core: int) -> torch.Tensor:
    """bool [Q, N + M]: what the plan lets each query see."""
    core = torch.arange(num_core, device=plan.anchors_Q.device)
    key_anchors = torch.cat((core, plan.own_anchors_M))
    key_depths = torch.cat((torch.zeros_like(core), plan.own_depths_M))
    anchors, depths, starts = plan.anchors_Q[:, None], plan.depths_Q[:, None], plan.starts_Q[:, None]
    in_core = (key_depths == 0) & (key_anchors <= anchors) & (key_anchors >= starts)
    return in_core | ((key_depths > 0) & (key_anchors == anchors) & (key_depths <= depths))


def main() -> int:
    """Exit status 1 where gradients differ from the CPU's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each algorithm")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of the GPU (H100, H200: 989)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    small = cases(is_small=True)
    verdicts = [against_the_cpu(case, device) for case in small]
    for case in small if asked.small else cases(is_small=False):
        flex_against_sdpa(case, device)
        timed(case, device, asked.seconds, asked.peak_tflops)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
