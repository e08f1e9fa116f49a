"""DATA as tokens on disk: where samples are cut, what is dropped, and what the user is told of it. Knows no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specctl.errors import DataError
from specctl.records.extraction import ExtractConfig, role_map
from specctl.records.progress import Reporter
from specctl.records.sample import Dropped, Sample

if TYPE_CHECKING:
    from specctl.core.positions import Positions
    from specctl.core.resume import Remaining
    from specctl.core.samples import SpoolReport
    from specctl.recipes.extract import Setup

LONGEST_ID: Final = 1024
"""Bytes. Shards pad every id to the longest one."""


def cut_length(config: ExtractConfig, positions: Positions | None) -> int:
    """The tokens that samples are cut to: `--max-length`, or the target's positions where those are fewer and
    either nothing lies past them or the user did not choose.
    """
    if positions is None:
        return config.max_length
    is_chosen = config.max_length != ExtractConfig("", ("",), "").max_length
    return config.max_length if is_chosen and not positions.is_table else positions.count


def read_data(config: ExtractConfig, setup: Setup, folder: Path, reporter: Reporter) -> SpoolReport:
    """Tokenise DATA into the spool. Raises DataError when no sample is kept."""
    from specctl.core import chat
    from specctl.core import folder as folders
    from specctl.core.samples import fill_spool

    samples = chat.samples(
        config.data,
        setup.tokenizer,
        template=setup.template,
        max_length=setup.max_length,
        role_map=role_map(config.role_map),
        vocab_size=setup.spec.vocab_size,
    )
    try:
        read = fill_spool(folder, _with_short_ids(samples), reporter)
    except OSError as error:
        raise folders.cannot_write(folder, error) from error
    if not read.samples:
        reasons = ", ".join(f"{reason} {count}" for reason, count in read.drops.items())
        raise DataError(
            f"all {read.rows} rows were dropped: {reasons}" if read.rows else "DATA has no rows",
            where=", ".join(config.data),
            hint="first: " + read.first_drops[0] if read.first_drops else None,
        )
    if read.drops:
        reasons = ", ".join(f"{reason} {count}" for reason, count in read.drops.items())
        reporter.warn(f"dropped {sum(read.drops.values())} of {read.rows} rows: {reasons}; {read.first_drops[0]}")
    if setup.positions is not None:
        _warn_of_length(config, setup, read, folder, reporter)
    return read


def _warn_of_length(config: ExtractConfig, setup: Setup, read: SpoolReport, folder: Path, reporter: Reporter) -> None:
    """Say what became of samples that are longer than the target has positions."""
    from specctl.core.samples import open_spool

    assert setup.positions is not None
    count = setup.positions.count
    longer = int((open_spool(folder).lengths > count).sum())
    if longer:
        reporter.warn(
            f"`--max-length {config.max_length}` is more than the {count} positions that the target was made for; "
            f"longer samples, left as they are: {longer}"
        )
    elif setup.max_length < config.max_length and (read.truncated or "truncated_away" in read.drops):
        reporter.warn(
            f"samples are cut to {count} tokens, the target's number of positions, which is less than "
            f"`--max-length {config.max_length}`; cut: {read.truncated}"
        )


def say_what_else_is_there(config: ExtractConfig, out: Path, left: Remaining, reporter: Reporter) -> None:
    """Tell of samples that the folder holds and this command did not ask for; a draft would be trained on them."""
    from specctl.core.folder import read_manifest

    held = read_manifest(out).counts["samples"]
    if left.stale:
        twice = f", {left.renewed} of them under an id that DATA gives to another text" if left.renewed else ""
        reporter.warn(
            f"samples of the folder that DATA does not have: {left.stale} of {held}{twice}; they stay in it, and "
            "`--overwrite` makes it of DATA alone"
        )
    if held > left.asked + left.stale:
        reporter.note(f"the folder holds {held} samples; this command asked for {left.asked}")


def _with_short_ids(samples: Iterable[Sample | Dropped]) -> Iterator[Sample | Dropped]:
    """The samples, with a hash in place of the end of an id that is too long to pad all others to."""
    for sample in samples:
        if isinstance(sample, Dropped) or len(sample.sample_id) * 4 <= LONGEST_ID:
            yield sample
            continue
        name = sample.sample_id.encode()
        if len(name) > LONGEST_ID:
            digest = hashlib.sha256(name).hexdigest()[:32]
            start = name[: LONGEST_ID - len(digest) - 1].decode(errors="ignore")
            sample = replace(sample, sample_id=f"{start}-{digest}")
        yield sample
