"""What a training run is asked, and what it answers. No torch."""

from dataclasses import dataclass
from typing import Final

RUN_FILE: Final = "run.json"
LOG_FILE: Final = "log.jsonl"
DRAFT: Final = "draft"
CHECKPOINTS: Final = "checkpoints"

FIXED: Final = (
    "target",
    "shards",
    "parallel_drafting",
    "ptd_token_id",
    "num_draft_tokens",
    "num_layers",
    "draft_vocab_size",
    "layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "loss",
    "depth_decay",
    "cod_ratio",
    "cod_floor",
    "batch_tokens",
    "accumulate",
    "eval_fraction",
    "dtype",
    "seed",
    "rope_theta",
    "train_embedding",
    "train_head",
    "init_head",
    "init_from",
    "weights",
)
"""Settings that a resumed run may not change: they decide what the weights and the order of data mean."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What to train, on what, and how long. Sizes that are None follow the target.

    `shards` are folders of `specctl extract`; `weights` how often each is taken, one per folder.
    `layers` names the boundaries that the draft reads, comma-separated; None takes every stored one.
    `batch_tokens` is the length of a packed row, `accumulate` the rows of one optimizer step over all
    processes. `eval_fraction` of the samples is held out, by sample id. With `fsdp` each process holds a share
    of weights, gradients and moments, else all of them.
    """

    shards: tuple[str, ...]
    target: str
    out: str
    parallel_drafting: bool = False
    num_draft_tokens: int | None = None
    ptd_token_id: int | None = None
    num_layers: int = 1
    draft_vocab_size: int | None = None
    layers: str | None = None
    depth_decay: float | None = None
    cod_ratio: float = 0.8
    cod_floor: float = 0.2
    loss: str = "kl"
    max_steps: int | None = None
    epochs: float | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    lr: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.1
    clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    dtype: str = "auto"
    device: str = "auto"
    eval_fraction: float = 0.05
    eval_every: int = 200
    eval_rows: int = 16
    save_every: int = 500
    keep: int = 2
    log_every: int = 10
    seed: int = 0
    resume: bool = False
    init_from: str | None = None
    init_head: str = "target"
    train_embedding: bool | None = None
    train_head: bool = True
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool | None = None
    fc_norm: bool = False
    norm_output: bool = False
    segments: int = 1
    checkpoint_layers: bool = False
    max_bad_samples: float = 0.01
    weights: tuple[float, ...] = ()
    nproc: int = 1
    fsdp: bool = False
    log: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class DepthScore:
    """One depth on held-out samples: mean loss in nats, greedy accuracy, and the rate of whole chains."""

    depth: int
    loss: float
    accuracy: float
    joint_rate: float
    outside_rate: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out score. `acceptance_length` is simulated: 1 + the joint rates, on the target's own text."""

    step: int
    tokens: int
    loss: float
    acceptance_length: float
    depths: tuple[DepthScore, ...]


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a run did. `tokens` counts those seen in training, supervised or not. `flat_gap` is how far a P-EAGLE
    draft's training forward is from what a server runs, relative; None where it was not taken."""

    out: str
    draft: str
    steps: int
    tokens: int
    supervised_tokens: int
    samples: int
    held_out: int
    bad_samples: int
    parameters: int
    trained_parameters: int
    seconds: float
    loss: float
    evaluation: Evaluation | None
    verdict: str
    passes: bool
    flat_gap: float | None = None


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a run would be. Bytes are estimates: `memory_bytes` of one process at its peak, without the
    libraries; `disk_bytes` of all checkpoints kept and the draft."""

    steps: int
    rows: int
    samples: int
    held_out: int
    tokens: int
    parameters: int
    trained_parameters: int
    draft_vocab_size: int
    coverage: float
    layers: tuple[int, ...]
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
