"""What `specctl regenerate` is asked and what it reports. Frozen data, checked at the door. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specctl.errors import UsageError
from specctl.records.dialogue import Sampling

DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
DEFAULT_BATCH: Final = 16
DEFAULT_CONCURRENCY: Final = 8


@dataclass(frozen=True, slots=True)
class RegenerateConfig:
    """What to ask, whom, and how. None means: not said."""

    target: str
    prompts: tuple[str, ...]
    out: str = ""
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0
    limit: int | None = None
    drop_truncated: bool = False
    overwrite: bool = False
    batch: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    chat_template: str | None = None
    trust_remote_code: bool = False
    endpoint: str | None = None
    concurrency: int | None = None
    api_key_env: str | None = None
    timeout_s: float = 600.0
    tries: int = 5

    def __post_init__(self) -> None:
        if not self.out:
            raise UsageError("`--out` is missing", hint="name a file, as in `--out answers.jsonl`")
        _check_numbers(self)
        _check_side(self)

    @property
    def sampling(self) -> Sampling:
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(self.max_new_tokens, self.temperature, top_p, self.seed)


@dataclass(frozen=True, slots=True)
class RegenerateReport:
    """What the file holds, and what this run added.

    `generated_tokens` is None where a server does not count; `failure_examples` are the first few.
    """

    out: str
    rows: int
    new_rows: int
    turns: int
    unanswered_turns: int
    truncated: int
    empty_answers: int
    other_rows: int
    drops: Mapping[str, int]
    failures: Mapping[str, int]
    failure_examples: Sequence[str]
    generated_tokens: int | None
    seconds: float
    tokens_per_s: float | None


def _check_numbers(config: RegenerateConfig) -> None:
    for name in ("max_new_tokens", "limit", "batch", "concurrency", "tries"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"`{_flag(name)}` is at least 1; found {value}")
    if not (math.isfinite(config.temperature) and config.temperature >= 0):
        raise UsageError(f"`--temperature` is 0 or more; found {config.temperature}")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        raise UsageError(f"`--top-p` is above 0 and at most 1; found {config.top_p}")
    if not config.timeout_s > 0:
        raise UsageError(f"`timeout_s` is above 0; found {config.timeout_s}")
    if config.top_p is not None and config.temperature == 0:
        raise UsageError(
            "`--top-p` means nothing at temperature 0, where the likeliest token is taken",
            hint="add `--temperature 0.7`, or leave `--top-p` out",
        )
    if config.dtype not in DTYPES:
        raise UsageError(f"`--dtype {config.dtype}` is unknown", hint=f"one of {', '.join(DTYPES)}")


def _check_side(config: RegenerateConfig) -> None:
    """An option of the other side would be ignored, so it is refused."""
    local = {
        "batch": config.batch is not None,
        "dtype": config.dtype != "auto",
        "device": config.device != "auto",
        "chat_template": config.chat_template is not None,
        "trust_remote_code": config.trust_remote_code,
    }
    remote = {"concurrency": config.concurrency is not None, "api_key_env": config.api_key_env is not None}
    if config.endpoint is not None and any(local.values()):
        name = next(name for name, is_given in local.items() if is_given)
        raise UsageError(f"`{_flag(name)}` is the server's business and `--endpoint` is given", hint="leave one out")
    if config.endpoint is None and any(remote.values()):
        name = next(name for name, is_given in remote.items() if is_given)
        raise UsageError(f"`{_flag(name)}` belongs to `--endpoint`, which is not given", hint="leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
