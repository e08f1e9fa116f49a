"""The losses of both drafts, one element at a time in float64, from the papers' definitions alone.

Shares nothing with specctl: a document is plain lists and vectors, a head a dict of tensors, and what an
element sees is looked up element by element. Slow on purpose.

Source: arXiv 2503.01840 section 3 (EAGLE-3), arXiv 2602.01469 section 3 (P-EAGLE).
"""

import math
import struct
from typing import Any

import torch

Vector = torch.Tensor


def norm(x: Vector, weight: Vector, eps: float) -> Vector:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Vector, position: int, theta: float) -> Vector:
    """Turn each pair (i, i + E/2) by position * theta**(-2i/E), frequencies rounded to float32."""
    half = len(x) // 2
    out = [x[0]] * len(x)
    for i in range(half):
        frequency = struct.unpack("f", struct.pack("f", theta ** (-2 * i / len(x))))[0]
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = x[i] * c - x[half + i] * s
        out[half + i] = x[half + i] * c + x[i] * s
    return torch.stack(out)


class Loop:
    """A head over one document."""

    def __init__(self, head: Any, weights: dict[str, Vector], document: dict[str, Any], teacher: dict[str, Any]):
        self.head, self.w, self.document, self.teacher = head, weights, document, teacher
        self.kept: dict[tuple[int, int, int], tuple[list[Vector], list[Vector]]] = {}

    def project(self, state: Vector) -> Vector:
        if self.head.norm_before_fc:
            state = norm(state, self.w["input_norm.weight"], self.head.rms_norm_eps)
        if self.head.fc_norm:
            parts = state.split(self.head.target_hidden_size)
            state = torch.cat(
                [norm(p, self.w[f"fc_norm.{i}.weight"], self.head.rms_norm_eps) for i, p in enumerate(parts)]
            )
        return self.w["fc.weight"] @ state

    def linear(self, name: str, x: Vector) -> Vector:
        out = self.w[f"{name}.weight"] @ x
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def heads(self, name: str, layer: int, x: Vector) -> list[Vector]:
        out = list(self.linear(f"layers.{layer}.self_attn.{name}_proj", x).split(self.head.head_dim))
        if self.head.block == "qwen3" and name in "qk":
            weight = self.w[f"layers.{layer}.self_attn.{name}_norm.weight"]
            out = [norm(h, weight, self.head.rms_norm_eps) for h in out]
        return out

    def sees(self, slot: int, depth: int, layer: int) -> list[tuple[int, int]]:
        seen = [(p, 0) for p in range(slot + 1)] + [(slot, d) for d in range(1, depth + 1)]
        types, window = self.head.layer_types, self.head.sliding_window
        if types is not None and types[layer] == "sliding_attention":
            seen = [(p, d) for p, d in seen if slot + depth - (p + d) < window]
        return seen

    def run(self, elements: list[tuple[int, int]], embeds: list[Vector], hiddens: list[Vector]) -> list[Vector]:
        """The stream of each element before the final norm."""
        head, eps = self.head, self.head.rms_norm_eps
        theta, group = head.rope["rope_theta"], head.num_attention_heads // head.num_key_value_heads
        for layer in range(head.num_hidden_layers):
            at = f"layers.{layer}"
            inputs, residuals = [], []
            for embed, hidden in zip(embeds, hiddens, strict=True):
                if layer == 0:
                    normed = norm(hidden, self.w[f"{at}.hidden_norm.weight"], eps)
                    inputs.append(torch.cat((norm(embed, self.w[f"{at}.input_layernorm.weight"], eps), normed)))
                    residuals.append(normed if head.norm_before_residual else hidden)
                else:
                    inputs.append(norm(hidden, self.w[f"{at}.input_layernorm.weight"], eps))
                    residuals.append(hidden)
            for (slot, depth), x in zip(elements, inputs, strict=True):
                keys = [rotate(k, slot + depth, theta) for k in self.heads("k", layer, x)]
                self.kept[layer, slot, depth] = keys, self.heads("v", layer, x)
            hiddens = []
            for (slot, depth), x, residual in zip(elements, inputs, residuals, strict=True):
                mixed = []
                for h, q in enumerate(self.heads("q", layer, x)):
                    q = rotate(q, slot + depth, theta)
                    seen = [self.kept[layer, p, d] for p, d in self.sees(slot, depth, layer)]
                    scores = torch.stack([q @ k[h // group] for k, _ in seen]) / math.sqrt(len(q))
                    share = torch.softmax(scores, 0)
                    mixed.append(sum(s * v[h // group] for s, (_, v) in zip(share, seen, strict=True)))
                stream = residual + self.linear(f"{at}.self_attn.o_proj", torch.cat(mixed))
                x = norm(stream, self.w[f"{at}.post_attention_layernorm.weight"], eps)
                gate = self.linear(f"{at}.mlp.gate_proj", x)
                gated = gate / (1 + torch.exp(-gate)) * self.linear(f"{at}.mlp.up_proj", x)
                hiddens.append(stream + self.linear(f"{at}.mlp.down_proj", gated))
        return hiddens

    def is_scored(self, slot: int, depth: int) -> bool:
        token = slot + 2 + depth
        return token < len(self.document["ids"]) and bool(self.document["mask"][token])

    def loss(self, stream: Vector, slot: int, depth: int, kind: str) -> Vector | None:
        """The unweighted loss of one element; None where `ce` has no label."""
        log_q = torch.log_softmax(
            self.w["lm_head.weight"] @ norm(stream, self.w["norm.weight"], self.head.rms_norm_eps), 0
        )
        target = self.teacher["weight"] @ self.document["final"][slot + 1 + depth]
        vocabulary = self.teacher["vocabulary"]
        if kind == "ce":
            best = int(target.argmax())
            return -log_q[vocabulary.index(best)] if best in vocabulary else None
        log_p = torch.log_softmax(target[vocabulary], 0)
        return (torch.exp(log_p) * (log_p - log_q)).sum()

    def embed(self, token: int) -> Vector:
        return self.w["embed_tokens.weight"][token]


def eagle3(loop: Loop, steps: int, decay: float, kind: str = "kl") -> tuple[Vector, float]:
    """Weighted loss and weight of all steps at all slots."""
    ids, slots = loop.document["ids"], range(len(loop.document["ids"]) - 1)
    hiddens = {p: loop.project(loop.document["aux"][p]) for p in slots}
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for step in range(steps):
        here = [p for p in slots if p + 1 + step < len(ids)]
        streams = loop.run(
            [(p, step) for p in here], [loop.embed(ids[p + 1 + step]) for p in here], [hiddens[p] for p in here]
        )
        for p, stream in zip(here, streams, strict=True):
            loss = loop.loss(stream, p, step, kind) if loop.is_scored(p, step) else None
            if loss is not None:
                total, weight = total + decay**step * loss, weight + decay**step
            is_normed = loop.head.norm_output
            hiddens[p] = norm(stream, loop.w["norm.weight"], loop.head.rms_norm_eps) if is_normed else stream
    return total, weight


def peagle(
    loop: Loop, chains: list[tuple[int, int]], decay: float, reserved: int, kind: str = "kl"
) -> tuple[Vector, float]:
    """Weighted loss and weight of depth 0 at all slots and of the given (slot, depth) elements."""
    ids, slots = loop.document["ids"], range(len(loop.document["ids"]) - 1)
    elements = [(p, 0) for p in slots] + sorted(chains)
    embeds = [loop.embed(ids[p + 1] if d == 0 else reserved) for p, d in elements]
    hiddens = [loop.project(loop.document["aux"][p] if d == 0 else loop.w["mask_hidden"].view(-1)) for p, d in elements]
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for (p, d), stream in zip(elements, loop.run(elements, embeds, hiddens), strict=True):
        loss = loop.loss(stream, p, d, kind) if loop.is_scored(p, d) else None
        if loss is not None:
            total, weight = total + decay**d * loss, weight + decay**d
    return total, weight
