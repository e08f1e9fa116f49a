"""The seams: Protocols of plug-in modules, and finding them by file name.

A plug-in is a module in one of the folders below; its file name is its registration. Listing names
reads the folder and imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import specctl
from specctl.errors import NotSupportedError, UsageError

if TYPE_CHECKING:
    from specctl.files.checkpoint import Checkpoint
    from specctl.files.head import Asked, Head, Written
    from specctl.records.draft import DraftBatch, DraftSettings, LossReport
    from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt, SizeResult
    from specctl.records.extraction import StatesPlan
    from specctl.records.progress import Reporter
    from specctl.records.shard import ShardEntry, ShardLayout, SlotArray

Kind = Literal["stores", "formats", "contracts", "drafts", "engines"]


class ShardReader(Protocol):
    """One open shard; arrays are read-only and may be memory-mapped."""

    layout: ShardLayout
    sample_ids: Sequence[str]

    def offsets(self) -> Any:
        """int64 [S+1]: sample i is rows offsets[i]:offsets[i+1]."""

    def input_ids(self) -> Any:
        """int32 [T]."""

    def loss_mask(self) -> Any:
        """uint8 [T]."""

    def slot(self, slot: str, rows: slice | None = None) -> Any:
        """The states of one slot, [T, D], in `layout.dtype` (bfloat16 as its uint16 bits)."""


class Store(Protocol):
    """One shard container. Source: docs/design.md, Shards."""

    SUFFIX: str
    COMPRESSIONS: tuple[str, ...]
    IS_RANDOM_ACCESS: bool
    """Several processes may write their slots into one file at once."""

    def write(
        self, path: Path, layout: ShardLayout, small: Mapping[str, SlotArray], slots: Mapping[str, SlotArray]
    ) -> None:
        """Write a whole shard to `path` and sync it."""

    def open_shard(self, path: Path, entry: ShardEntry | None = None) -> ShardReader:
        """Open a shard, checking its size and structure. Raises ShardError."""


class Format(Protocol):
    """One checkpoint layout. Source: docs/design.md, Checkpoints."""

    TITLE: str
    """What the layout is called, with the project that writes it."""

    def recognise(self, checkpoint: Checkpoint) -> int:
        """How much of the checkpoint looks like this layout, from 0 (certainly not) to 100; never raises."""

    def aux_ids(self, checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
        """The boundary ids that the checkpoint means, None where it does not say; never raises."""

    def read(self, checkpoint: Checkpoint, asked: Asked) -> Head:
        """The head in canonical terms.

        Raises InputError for what is broken, UsageError naming the option where the checkpoint does
        not determine an answer, NotSupportedError for what canonical terms cannot say.
        """

    def write(self, head: Head, asked: Asked) -> Written:
        """The head as this layout spells it. Raises NotSupportedError for what the layout cannot hold."""


class Draft(Protocol):
    """One algorithm for a draft: how it is trained. Source: docs/design.md, Slot frame."""

    IS_PARALLEL: bool
    """One forward drafts every token; the head then has `mask_hidden` and a reserved token."""

    def training_loss(
        self, model: Any, batch: DraftBatch, *, teacher: Any, settings: DraftSettings, generator: Any
    ) -> LossReport:
        """Summed losses of a packed batch. `model` is a core.modules.DraftModel, `teacher` a
        core.losses.Teacher, `generator` a torch.Generator on the CPU from which all draws come."""


class Engine(Protocol):
    """One way to decode with a draft. Source: docs/design.md, Engines."""

    TITLE: str
    """What it is, for help and refusals."""
    IS_SERVER: bool
    """Another program decodes: it is started or attached to, and the options for servers have a meaning."""

    def refuse(self, config: EvalConfig) -> None:
        """Raises UsageError or NotSupportedError for options it cannot run, before anything is read."""

    def ready(self, plan: DecodePlan, reporter: Reporter) -> DecodePlan:
        """The plan as it will be run, once machine, versions and every size are known to do for it.

        Raises SpecctlError for what they cannot do, before anything is started.
        """

    def open(
        self, plan: DecodePlan, pp: int, reporter: Reporter
    ) -> AbstractContextManager[Callable[[Sequence[Prompt]], SizeResult]]:
        """Everything that runs at one size, given back at the end whatever happens.

        What it gives decodes prompts and has one result for each, in their order.
        """


class StatesEngine(Protocol):
    """An engine that also hands out hidden states, by request."""

    def ready_states(self, plan: StatesPlan, reporter: Reporter) -> Mapping[str, str]:
        """The versions of the engine. Raises SpecctlError for what it cannot do, before anything is started."""

    def open_states(
        self, plan: StatesPlan, reporter: Reporter
    ) -> AbstractContextManager[Callable[[Mapping[str, Any]], Iterable[Any]]]:
        """The engine under way: from request ids with their tokens (int32) to `core.collect.Piece`s, in any order."""


def names(kind: Kind) -> tuple[str, ...]:
    """The plug-ins of one kind, sorted."""
    folder = Path(specctl.__file__).parent / kind
    return tuple(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))


def load(kind: Kind, name: str) -> ModuleType:
    """The plug-in module called `name`. Raises UsageError with the names there are."""
    if name not in names(kind):
        raise UsageError(f"no {kind[:-1]} is called `{name}`", hint=f"there are: {', '.join(names(kind))}")
    return importlib.import_module(f"specctl.{kind}.{name}")


def load_store(name: str) -> Store:
    """The shard container called `name`."""
    return cast("Store", load("stores", name))


def recognise(checkpoint: Checkpoint) -> str | None:
    """The layout that most of a checkpoint looks like, the canonical one of equals; None where none does."""
    scores = {name: load_format(name).recognise(checkpoint) for name in names("formats")}
    best = max(scores, key=lambda name: (scores[name], name == "vllm"))
    return best if scores[best] > 0 else None


def load_draft(name: str) -> Draft:
    """The draft algorithm called `name`."""
    return cast(Draft, load("drafts", name))


def load_engine(name: str) -> Engine:
    """The engine called `name`."""
    return cast("Engine", load("engines", name))


def load_states_engine(name: str) -> StatesEngine:
    """The engine called `name`, which hands out states. Raises NotSupportedError, UsageError."""
    engine = load("engines", name)
    if not hasattr(engine, "open_states"):
        able = [other for other in names("engines") if hasattr(load("engines", other), "open_states")]
        raise NotSupportedError(
            f"`--engine {name}` hands out no hidden states", hint=f"there are: {', '.join([*able, 'reference'])}"
        )
    return cast("StatesEngine", engine)


def load_format(name: str) -> Format:
    """The checkpoint layout called `name`."""
    return cast("Format", load("formats", name))
