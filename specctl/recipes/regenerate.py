"""Answers written by the target itself, as conversations to train a draft on.

A draft is to guess what its target says, so it learns from the target's own words: questions stay,
every answer is replaced. Knows the order of work; generation, HTTP and files are in `core`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specctl.errors import DataError, InterruptedRun, MachineError, UsageError
from specctl.records.conversation import Conversation
from specctl.records.dialogue import Answered, Dialogue, Failed, dialogue
from specctl.records.progress import Reporter
from specctl.records.regeneration import (
    DEFAULT_BATCH,
    DEFAULT_CONCURRENCY,
    RegenerateConfig,
    RegenerateReport,
)
from specctl.records.sample import Dropped

if TYPE_CHECKING:
    from specctl.core.answers import AnswerFile, StoredRow

MAX_EXAMPLES: Final = 5

Outcome = Answered | Dropped | Failed
Answers = Generator[Sequence[Outcome], None, None]


@dataclass(frozen=True, slots=True)
class _Source:
    """Who answers: the settings that decide an answer's words, and the stream of answers."""

    settings: Mapping[str, Any]
    answers: Callable[[Iterator[Dialogue], Callable[[Dialogue], bool]], Answers]


@dataclass(slots=True)
class _Tally:
    """Counts while the work goes on; `planned` maps the dialogues' keys to row ids, in input order."""

    planned: dict[str, str] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    new_rows: int = 0
    truncated: int = 0
    tokens: int = 0
    is_counted: bool = True


def regenerate(config: RegenerateConfig, reporter: Reporter, *, api_key: str | None = None) -> RegenerateReport:
    """Answer every conversation of the prompts and write them to `config.out`.

    A row that is there already is not asked again. `api_key` goes to the endpoint. Raises DataError
    when no row is kept, MachineError when every request failed, InterruptedRun on Ctrl-C with the
    finished rows kept, and what reading, loading and writing raise.
    """
    from specctl.core.answers import open_answers
    from specctl.core.datafiles import check_files

    began = time.monotonic()
    check_files(config.prompts)
    _check_out(config)
    tally = _Tally()
    try:
        source = _remote(config, api_key) if config.endpoint is not None else _local(config)
        with open_answers(Path(config.out), source.settings, overwrite=config.overwrite) as file:
            _answer(config, source, file=file, tally=tally, reporter=reporter)
            if tally.failures and tally.planned.keys() & file.rows.keys():
                reporter.warn(f"{tally.failures.total()} rows have no answer; run again to ask for them again")
            kept, others = file.finish(tally.planned, drop_truncated=config.drop_truncated)
            return _report(config, kept, others=others, file=file, tally=tally, seconds=time.monotonic() - began)
    except KeyboardInterrupt:
        raise InterruptedRun(
            f"interrupted after {tally.new_rows} new rows, which are kept",
            where=f"{config.out}.partial",
            hint="run the same command again, without `--overwrite`, to continue",
        ) from None
    finally:
        reporter.stop()


def _answer(config: RegenerateConfig, source: _Source, *, file: AnswerFile, tally: _Tally, reporter: Reporter) -> None:
    if file.rows:
        reporter.note(f"{len(file.rows)} rows are there already")
    reporter.start("regenerate", config.limit, "rows", min(len(file.rows), config.limit or len(file.rows)))

    def is_done(asked: Dialogue) -> bool:
        return asked.key in file.rows

    with closing(source.answers(_dialogues(config, tally), is_done)) as answers:
        for outcomes in answers:
            answered = [o for o in outcomes if isinstance(o, Answered) and not is_done(o.dialogue)]
            file.append(answered)
            _count(outcomes, answered, tally, reporter)
            reporter.advance(len(answered))


def _count(outcomes: Sequence[Outcome], answered: Sequence[Answered], tally: _Tally, reporter: Reporter) -> None:
    tally.new_rows += len(answered)
    for answer in (answer for row in answered for answer in row.answers):
        tally.is_counted &= answer.num_tokens is not None
        tally.tokens += answer.num_tokens or 0
    for outcome in outcomes:
        if isinstance(outcome, Dropped):
            tally.drops[outcome.reason] += 1
        elif isinstance(outcome, Failed):
            tally.failures[outcome.reason] += 1
            if len(tally.examples) < MAX_EXAMPLES:
                tally.examples.append(f"{outcome.dialogue.where}: {outcome.detail}")
                reporter.warn(f"no answer for {tally.examples[-1]}")


def _dialogues(config: RegenerateConfig, tally: _Tally) -> Iterator[Dialogue]:
    """What the prompts ask, each once, up to the limit."""
    from specctl.core.conversations import read_rows

    for row in read_rows(config.prompts):
        if config.limit is not None and len(tally.planned) == config.limit:
            return
        asked = dialogue(row) if isinstance(row, Conversation) else row
        if isinstance(asked, Dialogue) and asked.key in tally.planned:
            tally.drops["repeated"] += 1
        elif isinstance(asked, Dialogue):
            tally.planned[asked.key] = asked.row_id
            yield asked
        else:
            tally.drops[asked.reason if isinstance(asked, Dropped) else "not_a_conversation"] += 1


def _local(config: RegenerateConfig) -> _Source:
    from specctl.core.device import pick_device
    from specctl.core.generation import answer_locally, open_encoder
    from specctl.core.target import LoadedTarget, describe_target, load_target

    trust = config.trust_remote_code
    spec = describe_target(config.target, trust_remote_code=trust)
    encoder = open_encoder(spec, chat_template=config.chat_template, trust_remote_code=trust)
    device = pick_device(config.device)
    dtype = spec.compute_dtype if config.dtype == "auto" else config.dtype

    def load() -> LoadedTarget:
        return load_target(spec, dtype=dtype, device=device, trust_remote_code=trust)

    def answers(asked: Iterator[Dialogue], is_done: Callable[[Dialogue], bool]) -> Answers:
        batch = config.batch or DEFAULT_BATCH
        return answer_locally(asked, encoder, load=load, sampling=config.sampling, batch=batch, is_done=is_done)

    return _Source(
        _settings(
            config,
            Path(config.target).name if Path(config.target).exists() else config.target,
            weights=spec.weights_fingerprint,
            chat_template=encoder.template_hash,
            dtype=dtype,
        ),
        answers,
    )


def _remote(config: RegenerateConfig, api_key: str | None) -> _Source:
    from specctl.core.endpoint import answer_remotely, open_endpoint

    endpoint = open_endpoint(
        str(config.endpoint), config.target, timeout_s=config.timeout_s, tries=config.tries, api_key=api_key
    )

    def answers(asked: Iterator[Dialogue], is_done: Callable[[Dialogue], bool]) -> Answers:
        fresh = (row for row in asked if not is_done(row))
        concurrency = config.concurrency or DEFAULT_CONCURRENCY
        return answer_remotely(fresh, endpoint, sampling=config.sampling, concurrency=concurrency)

    return _Source(_settings(config, config.target), answers)


def _settings(
    config: RegenerateConfig,
    target: str,
    *,
    weights: str | None = None,
    chat_template: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """What decides an answer. Not the batch: who changes it for lack of memory may continue."""
    is_sampled = config.temperature > 0
    return {
        "target": target,
        "by": "target" if config.endpoint is None else "endpoint",
        "weights": weights,
        "chat_template": chat_template,
        "dtype": dtype,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.sampling.top_p if is_sampled else None,
        "seed": config.seed if is_sampled else None,
    }


def _report(
    config: RegenerateConfig,
    kept: Sequence[StoredRow],
    *,
    others: int,
    file: AnswerFile,
    tally: _Tally,
    seconds: float,
) -> RegenerateReport:
    left_out = sum(row.is_truncated for row in file.rows.values()) if config.drop_truncated else 0
    drops = Counter(tally.drops) + Counter({"truncated": left_out})
    if not kept:
        raise _nothing_kept(drops, tally)
    tokens = tally.tokens if tally.is_counted else None
    return RegenerateReport(
        out=config.out,
        rows=len(kept),
        new_rows=tally.new_rows,
        turns=sum(row.num_turns for row in kept),
        unanswered_turns=sum(row.num_unanswered for row in kept),
        truncated=sum(row.is_truncated for row in kept) + left_out,
        empty_answers=sum(row.num_empty for row in kept),
        other_rows=others,
        drops=dict(sorted(drops.items())),
        failures=dict(sorted(tally.failures.items())),
        failure_examples=tuple(tally.examples),
        generated_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if tokens else None,
    )


def _nothing_kept(drops: Mapping[str, int], tally: _Tally) -> DataError | MachineError:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted((Counter(drops) + tally.failures).items()))
    if tally.failures:
        return MachineError(
            f"the endpoint answered none of the rows: {reasons}", hint=f"the first one: {tally.examples[0]}"
        )
    if not reasons:
        return DataError("the prompts hold no rows", hint="JSONL with `messages`, `prompt`, `turns` or `question`")
    hint = "a larger `--max-new-tokens` cuts fewer answers" if drops.get("truncated") else None
    return DataError(f"no row is kept of {sum(drops.values())}: {reasons}", hint=hint)


def _check_out(config: RegenerateConfig) -> None:
    out = Path(config.out)
    if out.exists() and not out.is_file():
        raise UsageError("`--out` is not a file", where=config.out, hint="name a file, as in `--out answers.jsonl`")
    if out.exists() and any(path != "-" and out.samefile(path) for path in config.prompts):
        raise UsageError("`--out` is one of the prompt files", where=config.out, hint="name another file")
