"""The draft as a module: the same one trains and decodes. Its `state_dict` names are the canonical tensor names.

Rows are elements, not batches: every tensor is [rows, ...], and who sees whom is the caller's `attend`.

Legend: N rows, H hidden size, A*D aux width, V target vocab, W draft vocab.
Source: arXiv 2503.01840; vllm `models/llama_eagle3.py`, `models/qwen3_eagle3.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from specctl.core.attention import Attend, KeysValues, attend_cached
from specctl.core.layer import DraftLayer, Lead, RMSNorm
from specctl.core.rotary import Phases, Rotary
from specctl.records.head import HeadConfig

INIT_STD = 0.02
HEAD_LOGIT_STD = 0.25
"""Spread of a fresh head's logits: enough to break ties, and the loss starts within 1 % of ln(W)."""

Result = TypeVar("Result")


class DraftModel(nn.Module):
    """A draft head as `HeadConfig` describes it; its `state_dict` has the canonical names and shapes.

    Fresh weights are drawn from `generator`. `d2t` (int64 offsets) and `t2d` (bool) are buffers, there
    iff the vocabulary is reduced; fresh ones keep the first W ids, see `set_vocabulary`. With
    `embeds_sparsely` the embedding's gradient holds the rows that were looked up and no others.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, head: HeadConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.head = head
        self.embeds_sparsely = False
        hidden, eps = head.hidden_size, head.rms_norm_eps
        self.embed_tokens = nn.Embedding(head.vocab_size, hidden)
        if head.use_aux:
            self.fc = nn.Linear(head.fc_width, hidden, bias=False)
        if head.norm_before_fc:
            self.input_norm = RMSNorm(head.fc_width, eps)
        if head.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(head.target_hidden_size, eps) for _ in range(head.num_aux))
        self.layers = nn.ModuleList(DraftLayer(head, i) for i in range(head.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, head.draft_vocab_size, bias=False)
        if head.parallel_drafting:
            self.mask_hidden = nn.Parameter(torch.empty(1, head.fc_width))
        if head.is_reduced:
            self.register_buffer("d2t", torch.zeros(head.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(head.vocab_size) < head.draft_vocab_size)
        self.rotary = Rotary(head)
        self._initialise(generator)

    def forward(self, step: Callable[[DraftModel], Result]) -> Result:
        """`step(self)`, run as this module's forward, so that DDP and FSDP see it."""
        return step(self)

    def embed(self, token_ids_N: torch.Tensor) -> torch.Tensor:
        """[N, H] in the dtype of the layers; ids are the target's."""
        return embedding(token_ids_N, self.embed_tokens.weight, sparse=self.embeds_sparsely)

    def lead(self, token_ids_N: torch.Tensor) -> Lead:
        """What these tokens bring into the layers: rows to pick from, computed once for all steps and depths.

        One look-up and one product for all, because a token enters every step of EAGLE-3, and because
        every look-up of a trained embedding costs a gradient of its whole size.
        """
        first = self.layers[0]
        assert isinstance(first, DraftLayer)
        return first.lead(self.embed(token_ids_N))

    def project(self, states_N: torch.Tensor) -> torch.Tensor:
        """The target's states [N, A*D] as this draft's hidden states [N, H]: input_norm, fc_norm per state, fc."""
        x = states_N.to(self.norm.weight.dtype)
        if self.head.norm_before_fc:
            x = self.input_norm(x)
        if self.head.fc_norm:
            parts = torch.split(x, self.head.target_hidden_size, dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(x) if self.head.use_aux else x

    def masked_projection(self) -> torch.Tensor:
        """[1, H]: what stands for the missing states of every depth beyond the first.

        Source: vllm `llm_base_proposer.py`, `combine_hidden_states(mask_hidden)`.
        """
        return self.project(self.mask_hidden) if self.head.use_aux else self.mask_hidden

    def reserved_id(self) -> torch.Tensor:
        """int64 [1]: the token that stands for those not known yet."""
        assert self.head.mask_token_id is not None
        return torch.tensor([self.head.mask_token_id], device=self.embed_tokens.weight.device)

    def phases(self, positions_N: torch.Tensor) -> Phases:
        """The rotary phases at these positions."""
        return self.rotary(positions_N, self.norm.weight.dtype)

    def run_layers(
        self,
        lead_N: Lead,
        hidden_N: torch.Tensor,
        phases: Phases,
        attends: Sequence[Attend],
        *,
        rows: torch.Tensor | None = None,
        is_checkpointed: bool = False,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The stream [rows, H] before the final norm, and each layer's keys and values.

        Only `rows` (all without) are computed in the last layer beyond its keys and values. With
        `is_checkpointed` each layer is computed again in backward instead of kept.
        """
        kept: list[KeysValues] = []
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            wanted = rows if index == len(self.layers) - 1 else None
            arguments = (None if index else lead_N, hidden_N, phases, attend, wanted)
            if is_checkpointed and torch.is_grad_enabled():
                hidden_N, keys_values = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden_N, keys_values = layer(*arguments)
            kept.append(keys_values)
        return hidden_N, kept

    def next_hidden(self, stream_N: torch.Tensor, normed_N: torch.Tensor) -> torch.Tensor:
        """What the next autoregressive step takes for hidden states: the normed stream iff `norm_output`."""
        return normed_N if self.head.norm_output else stream_N

    def logits(self, normed_N: torch.Tensor) -> torch.Tensor:
        """[N, W] over the draft vocabulary, from the stream after `norm`."""
        out: torch.Tensor = self.lm_head(normed_N)
        return out

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's id of each draft id."""
        return draft_ids + self.d2t[draft_ids] if self.head.is_reduced else draft_ids

    def vocabulary(self) -> torch.Tensor | None:
        """int64 [W], rising: the target's ids of the draft vocabulary; None where it is the target's."""
        return (
            torch.arange(self.head.draft_vocab_size, device=self.d2t.device) + self.d2t
            if self.head.is_reduced
            else None
        )

    def set_vocabulary(self, target_ids_W: torch.Tensor) -> None:
        """Draft id i means `target_ids_W[i]` from now on; the ids must rise."""
        assert target_ids_W.shape == self.d2t.shape and bool((target_ids_W.diff() > 0).all())
        self.d2t.copy_(target_ids_W.cpu() - torch.arange(len(target_ids_W)))
        self.t2d.zero_()[target_ids_W] = True

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD, generator=generator)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.lm_head.weight, std=HEAD_LOGIT_STD * self.head.hidden_size**-0.5, generator=generator)
        if self.head.parallel_drafting:
            nn.init.normal_(self.mask_hidden, generator=generator)


class DraftCache:
    """Keys and values of the slots decoded so far, per layer; can forget the newest."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._kept: list[KeysValues | None] = [None] * len(model.layers)

    def __len__(self) -> int:
        first = self._kept[0]
        return 0 if first is None else first[0].shape[0]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        self._kept = [None if kv is None else (kv[0][:length], kv[1][:length]) for kv in self._kept]

    def run(self, token_ids_N: torch.Tensor, hidden_N: torch.Tensor) -> torch.Tensor:
        """The stream [N, H] of N slots that follow those kept, which are kept too."""
        start, count = len(self), hidden_N.shape[0]
        lead = self._model.lead(token_ids_N)
        phases = self._model.phases(torch.arange(start, start + count, device=hidden_N.device))
        attends = [self._attend(index) for index in range(len(self._kept))]
        return self._model.run_layers(lead, hidden_N, phases, attends)[0]

    def _attend(self, index: int) -> Attend:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            old = self._kept[index]
            if old is not None:
                key, value = torch.cat((old[0], key)), torch.cat((old[1], value))
            self._kept[index] = (key, value)
            return attend_cached(query, key, value, self._model.layers[index].window)  # type: ignore[arg-type]

        return attend
