"""What `specctl extract` is asked and what it reports. Frozen data, checked at the door, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specctl.errors import UsageError
from specctl.records.target import TargetSpec

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ExtractConfig:
    """What `specctl extract` was asked. Field names are the flags' and the config file's.

    `engine` is a plug-in's name; the `server_*` say how to start one that is a server (see EvalConfig).
    """

    target: str
    data: tuple[str, ...]
    out: str
    layers: str = "aux,norm"
    dtype: str = "auto"
    format: str = "safetensors"
    compression: str | None = None
    max_length: int = 2048
    limit: int | None = None
    seed: int = 0
    batch_tokens: int | None = None
    shard_mib: int = 256
    chat_template: str | None = None
    role_map: tuple[str, ...] = ()
    revision: str | None = None
    device: str = "auto"
    pp: int = 1
    tp: int = 1
    allow_overflow: bool = False
    trust_remote_code: bool = False
    overwrite: bool = False
    engine: str = "reference"
    server_command: str | None = None
    server_venv: str | None = None
    server_args: str | None = None
    server_timeout: float = 900.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"`--dtype {self.dtype}` is not one of {', '.join(DTYPES)}")
        least = {"max_length": 2, "limit": 1, "batch_tokens": 1, "shard_mib": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise UsageError(f"`--{name.replace('_', '-')} {value}` must be at least {bound}")
        if not self.data:
            raise UsageError("no DATA was given", hint="name one or more files, or `-` for standard input")


@dataclass(frozen=True, slots=True)
class StatesPlan:
    """What an engine is to hand out: the states at boundary ids `ids`, rising, of texts of `longest` tokens at most."""

    config: ExtractConfig
    spec: TargetSpec
    ids: tuple[int, ...]
    dtype: str
    longest: int


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """What a run left in the folder, and what this run did. Bytes are on disk; seconds are of this run.

    `asked` samples are those of DATA within `--limit`; the folder holds `stale` ones that DATA does not have.
    """

    out: str
    target: str
    slots: tuple[str, ...]
    dtype: str
    format: str
    rows: int
    samples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    asked: int
    stale: int
    drops: Mapping[str, int]
    shards: int
    bytes: int
    new_tokens: int
    seconds: float
    tokens_per_s: float


def role_map(pairs: Sequence[str]) -> dict[str, str]:
    """`name=role` pairs as a mapping. Raises UsageError for another form."""
    mapped = {}
    for pair in pairs:
        name, separator, role = pair.partition("=")
        if not separator or role not in ("system", "user", "assistant", "tool"):
            raise UsageError(
                f"`--role-map {pair}` is not NAME=ROLE with a known role",
                hint="ROLE is one of system, user, assistant, tool",
            )
        mapped[name] = role
    return mapped
