"""What training a draft takes and gives: settings, a batch of packed rows, the sums of a loss. No torch at import.

Tensors: T packed tokens, A*D aux width, D the target's hidden size, K draft depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specctl.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

LossKind = Literal["kl", "ce"]


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How a draft is trained.

    `num_draft_tokens` is the number of training-time-test steps of EAGLE-3 and the K of P-EAGLE.
    `loss` is `kl` (the target's distribution over the draft vocabulary) or `ce` (its greedy token).
    `cod_ratio`, `cod_floor` and `num_segments` are P-EAGLE's: depth d keeps max(ratio**d, floor) of
    its positions; segments cut the memory of depths >= 1 and change no number.
    Raises UsageError for values without a meaning.
    """

    num_draft_tokens: int
    depth_decay: float = 0.8
    loss: LossKind = "kl"
    cod_ratio: float = 0.8
    cod_floor: float = 0.2
    num_segments: int = 1
    checkpoint_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "num_segments"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"`{name}` is {value!r}; it is a whole number from 1")
        if self.depth_decay <= 0:
            raise UsageError(f"`depth_decay` is {self.depth_decay!r}; a depth weighs more than nothing")
        if self.loss not in ("kl", "ce"):
            raise UsageError(f"`loss` is {self.loss!r}; it is `kl` or `ce`")
        for name in ("cod_ratio", "cod_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"`{name}` is {getattr(self, name)!r}; it is a share, from 0 to 1")


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Documents packed into one row.

    `input_ids` int64 [T]; document i is tokens offsets[i]:offsets[i+1], tokens after the last offset are
    padding; `loss_mask` bool or uint8 [T], set on the tokens that the draft should learn to propose;
    `aux` [T, A*D] the fused states in the order of fc's columns; `final` [T, D] the states of slot
    `norm`. `greedy_ids` int64 [T], where known, are the target's own greedy tokens: greedy_ids[q] is the
    argmax of its logits at token q. Without them they are computed where they are needed.
    """

    input_ids: Tensor
    offsets: tuple[int, ...]
    loss_mask: Tensor
    aux: Tensor
    final: Tensor
    greedy_ids: Tensor | None = None

    def __post_init__(self) -> None:
        length = self.input_ids.shape[0]
        assert self.offsets[0] == 0 and self.offsets[-1] <= length, (self.offsets, length)
        assert list(self.offsets) == sorted(self.offsets), self.offsets
        for name in ("loss_mask", "aux", "final", "greedy_ids"):
            tensor = getattr(self, name)
            assert tensor is None or tensor.shape[0] == length, (name, tensor.shape, length)


@dataclass(frozen=True, slots=True)
class LossReport:
    """Sums over the scored elements of one batch; never means, so that batches add up.

    `loss` is the weighted sum, the scalar to differentiate; `weight` (a float64 scalar) the sum of the same
    weights, so that loss / weight is a mean in nats. All others are [K], by depth: elements counted, their
    unweighted loss, greedy hits, elements whose target's greedy token lies outside the draft vocabulary
    (always a miss), chains scored from depth 0 up to here, and those hit all the way.
    """

    loss: Tensor
    weight: Tensor
    counts: Tensor
    losses: Tensor
    hits: Tensor
    outside: Tensor
    prefix_counts: Tensor
    prefix_hits: Tensor

    def simulated_acceptance_length(self) -> float:
        """1 + the joint rate of hits at each depth: what greedy decoding of this text would accept.

        In [1, K + 1]; a depth that no chain reached adds nothing.
        Source: NVIDIA-NeMo/Automodel#2959.
        """
        rates = self.prefix_hits.double() / self.prefix_counts.double().clamp_min(1)
        return 1.0 + float(rates.sum())
