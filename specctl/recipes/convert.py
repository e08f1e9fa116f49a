"""Convert a draft from one checkpoint layout to another, through the canonical form. No torch.

Tensors are copied, moved in blocks or made from the map of ids, never computed with: each one of the output
is traced to where it came from, each one left out is named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

from specctl import plugins
from specctl.errors import InputError, InterruptedRun, UsageError
from specctl.files.checkpoint import HARMLESS, Checkpoint, open_checkpoint
from specctl.files.durable import new_folder, refuse_taken
from specctl.files.head import Asked, Convention, Head, Written
from specctl.files.headfolder import WEIGHTS, write_head
from specctl.files.hub import local_folder
from specctl.files.safetensors import read_header
from specctl.files.target import read_target
from specctl.recipes.trace import Changed, Dropped, Traced, changes, dropped, traced
from specctl.records.layers import aux_boundaries
from specctl.records.progress import Reporter

CONVENTIONS: Final = ("boundary", "output")
MB: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ConvertConfig:
    """What to convert, and what the source does not say. `aux_layers` are boundary ids or `aux`."""

    source: str
    out: str
    to: str
    target: str | None = None
    from_layout: str | None = None
    source_layer_convention: str | None = None
    aux_layers: str | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    mask_token: int | None = None
    num_draft_tokens: int | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was converted. `aux_ids` are boundary ids; `written` is false for a dry run."""

    source: str
    out: str
    from_layout: str
    to: str
    written: bool
    aux_ids: tuple[int, ...] | None
    changes: tuple[Changed, ...]
    trace: tuple[Traced, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    bytes: int


def convert(config: ConvertConfig, reporter: Reporter) -> ConvertReport:
    """Write the head of `config.source` as `config.out`, or with `dry_run` only say what that would be.

    Raises UsageError naming the option where the source does not determine an answer, InputError for a
    source that is broken, NotSupportedError for what the layout cannot hold, MachineError for the disk,
    InterruptedRun when the user stopped it.
    """
    _require_options(config)
    checkpoint = open_checkpoint(local_folder(config.source, what="draft"))
    _refuse_problems(checkpoint, reporter)
    checkpoint = replace(checkpoint, problems=())  # what is left was said, and is none of the layouts' business
    layout = config.from_layout or recognised(checkpoint)
    asked = _asked(config)
    refuse_taken(Path(config.out), "a checkpoint")
    head = plugins.load_format(layout).read(checkpoint, asked)
    if config.mask_token is not None and not head.config.parallel_drafting:
        raise UsageError("`--mask-token` has a meaning for P-EAGLE heads only, and this is an EAGLE-3 head")
    written = plugins.load_format(config.to).write(head, asked)
    report = _report(config, checkpoint, layout, head, written)
    if not config.dry_run:
        reporter.note(f"writing {len(written.tensors)} tensors to {config.out}")
        try:
            _write(Path(config.out), written, reporter)
        except KeyboardInterrupt:
            raise InterruptedRun("interrupted before the checkpoint was whole; nothing of it is left") from None
    return report


def recognised(checkpoint: Checkpoint) -> str:
    """The layout that the checkpoint looks most like. Raises UsageError when it looks like none."""
    name = plugins.recognise(checkpoint)
    if name is None:
        raise UsageError(
            "the folder looks like no layout of an EAGLE-3 head",
            where=str(checkpoint.folder),
            hint=f"name it with `--from`; there are: {', '.join(plugins.names('formats'))}",
        )
    return name


def _require_options(config: ConvertConfig) -> None:
    for name in filter(None, (config.to, config.from_layout)):
        plugins.load_format(name)
    convention = config.source_layer_convention
    if convention not in (None, *CONVENTIONS):
        raise UsageError(
            f"`--source-layer-convention {convention}` is none", hint=f"there are: {', '.join(CONVENTIONS)}"
        )
    if config.num_draft_tokens is not None and config.num_draft_tokens < 1:
        raise UsageError(f"`--num-draft-tokens {config.num_draft_tokens}` must be 1 or more")
    if config.mask_token is not None and config.mask_token < 0:
        raise UsageError(f"`--mask-token {config.mask_token}` is no token id")


def _refuse_problems(checkpoint: Checkpoint, reporter: Reporter) -> None:
    """Raises InputError for the first problem of the files that leaves open what is meant."""
    for problem in checkpoint.problems:
        if problem.rule not in HARMLESS:
            raise InputError(
                f"expected {problem.expected}; found {problem.found.removeprefix('expected ')}",
                where=f"{checkpoint.folder}: {problem.where}",
                hint="`specctl check-ckpt` lists everything that is wrong with the files",
            )
        reporter.warn(f"{problem.where}: expected {problem.expected}; found {problem.found}")


def _asked(config: ConvertConfig) -> Asked:
    """The options as records; the target by its headers."""
    asked = Asked(
        convention=cast("Convention | None", config.source_layer_convention),
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
        mask_token_id=config.mask_token,
        num_draft_tokens=config.num_draft_tokens,
    )
    if config.target is not None:
        is_id = not Path(config.target).expanduser().exists()
        files = read_target(local_folder(config.target, what="target"), config.target if is_id else None)
        asked = replace(asked, target=files.facts, embedding=files.embedding, lm_head=files.lm_head)
    return replace(asked, aux_ids=_layers(config.aux_layers, asked)) if config.aux_layers is not None else asked


def _layers(text: str, asked: Asked) -> tuple[int, ...]:
    """Boundary ids in the order of fc's columns, from `2,18,33` or `aux`."""
    if text.strip() == "aux":
        if asked.target is None:
            raise UsageError("`--aux-layers aux` is 2, N/2 and N-3 of the target's N layers", hint="give `--target`")
        return aux_boundaries(asked.target.num_layers)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise UsageError(
            f"`--aux-layers {text}` is neither `aux` nor a list of layers",
            hint="`--aux-layers 2,18,33`: for each state the number of layers run before it",
        )
    return tuple(map(int, words))


def _report(config: ConvertConfig, checkpoint: Checkpoint, layout: str, head: Head, written: Written) -> ConvertReport:
    trace = tuple(traced(name, written, checkpoint) for name in sorted(written.tensors))
    notes = (*head.notes, *written.notes)
    return ConvertReport(
        source=config.source,
        out=config.out,
        from_layout=layout,
        to=config.to,
        written=not config.dry_run,
        aux_ids=head.config.aux_ids,
        changes=tuple(changes(checkpoint.config, written.config)),
        trace=trace,
        dropped=tuple(dropped(checkpoint, written)),
        notes=notes,
        bytes=sum(source.nbytes for source in written.tensors.values()),
    )


def _write(out: Path, written: Written, reporter: Reporter) -> None:
    """The folder with the weights and config.json; verified before it gets its name."""
    with new_folder(out, "a checkpoint") as folder:
        reporter.start("writing", sum(source.nbytes for source in written.tensors.values()) // MB, "MB")
        try:
            write_head(folder, written.config, written.tensors, _in_megabytes(reporter.advance))
        finally:
            reporter.stop()
        _verify(folder / WEIGHTS, written)


def _in_megabytes(advance: Callable[[int], None]) -> Callable[[int], None]:
    """Counts bytes and hands on whole megabytes: pieces are smaller or larger than one."""
    done = 0

    def count(size: int) -> None:
        nonlocal done
        before, done = done, done + size
        if done // MB > before // MB:
            advance(done // MB - before // MB)

    return count


def _verify(path: Path, written: Written) -> None:
    """Raises InputError unless the written header says what was meant."""
    found = {name: (entry.dtype, entry.shape) for name, entry in read_header(path)[0].items()}
    meant = {name: (source.dtype, tuple(source.shape)) for name, source in written.tensors.items()}
    if found != meant:
        wrong = sorted(name for name in {*found, *meant} if found.get(name) != meant.get(name))
        raise InputError(f"`{wrong[0]}` was not written as it was meant", where=str(path))
