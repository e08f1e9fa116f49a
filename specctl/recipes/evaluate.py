"""The road from a target, a draft and prompts to a judged acceptance length. Knows no torch at import."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specctl import plugins
from specctl.errors import InterruptedRun, NotSupportedError, SpecctlError
from specctl.recipes.check import check
from specctl.recipes.evalplan import DEFAULT_DRAFT_TOKENS, Asked, make_plan, prompts_of, refuse
from specctl.recipes.served import note_draft, refuse_long
from specctl.records.check import CheckConfig
from specctl.records.dialogue import Answer
from specctl.records.evaluation import DecodePlan, EvalConfig, EvalResult, Prompt, SizeResult
from specctl.records.progress import Reporter
from specctl.records.provenance import versions


class StoppedRun(SpecctlError):
    """What ended a run after sizes were measured: says what `cause` says, and `result` holds those sizes."""

    def __init__(self, cause: SpecctlError, result: EvalResult) -> None:
        super().__init__(cause.message, where=cause.where, hint=cause.hint)
        self.exit_code = cause.exit_code
        self.cause, self.result = cause, result


def evaluate(config: EvalConfig, reporter: Reporter, *, api_key: str | None = None) -> EvalResult:
    """Decode the prompts at every size and count what was accepted. `api_key` goes to the endpoint.

    Raises SpecctlError for whatever the user or the machine can cause: StoppedRun once a size was measured.
    """
    refuse(config)
    engine = plugins.load_engine(config.engine)
    try:
        plan, asked = make_plan(config, reporter)
        plan = engine.ready(replace(plan, api_key=api_key), reporter)
        if engine.IS_SERVER and config.draft is not None:
            _require_passing(plan, reporter)
            note_draft(plan, reporter)
        sizes, cause = _measured(engine, plan, asked, reporter)
    except KeyboardInterrupt:
        raise InterruptedRun("interrupted; nothing was measured", hint="run the same command again") from None
    finally:
        reporter.stop()
    first = sizes[0].results
    baselines: tuple[Any, ...] = ()
    if config.baseline and config.temperature > 0:
        reporter.note("guessing without a draft is measured on greedy text alone")
    if config.baseline and config.temperature == 0:
        from specctl.core.tables import baselines as replayed

        baselines = replayed(first, plan.num_draft_tokens or config.num_draft_tokens or DEFAULT_DRAFT_TOKENS)
    result = EvalResult(_settings(plan, asked), {**versions(), **plan.versions}, tuple(sizes), baselines)
    if cause is not None:
        raise StoppedRun(cause, result) from cause
    return result


def _require_passing(plan: DecodePlan, reporter: Reporter) -> None:
    """Raises NotSupportedError for a draft that the server would not load, or would load and not run well."""
    config = plan.config
    assert config.draft is not None
    asked = CheckConfig(
        config.draft,
        plan.spec.path,
        config.engine,
        _release(plan.versions.get(config.engine)),
        max(config.pp),
    )
    report = check(asked, reporter)
    for finding in report.findings:
        sentence = f"{finding.says} ({finding.rule}): expected {finding.expected} and found {finding.found}"
        if finding.level == "error":
            hint = report.instead[0] if report.instead else finding.fix
            if finding.rule == "PARALLEL_SGLANG":
                hint = "measure it with `--engine vllm`, from vLLM 0.16 on"
            raise NotSupportedError(sentence, where=f"{config.draft}: {finding.where}", hint=hint)
        if finding.level == "warning":
            reporter.warn(sentence)


def _release(version: str | None) -> str | None:
    """A version that rules are judged by; None, which means the newest, for a build that does not say its release."""
    is_said = version is not None and re.match(r"v?\d+\.\d+", version) and not re.match(r"v?0\.[01]\.?dev", version)
    return version if is_said else None


def _measured(
    engine: plugins.Engine, plan: DecodePlan, asked: Asked, reporter: Reporter
) -> tuple[list[SizeResult], SpecctlError | None]:
    """The sizes that were measured whole, at least one, and what kept the others from it."""
    sizes: list[SizeResult] = []
    try:
        for size in _sizes(engine, plan, asked, reporter):
            # One by one: what was measured stays when the next size fails.
            sizes.append(size)
    except KeyboardInterrupt:
        if not sizes:
            raise
        left = ", ".join(f"pp {pp}" for pp in plan.config.pp[len(sizes) :])
        return sizes, InterruptedRun(f"interrupted; not measured: {left}", hint="run the same command again")
    except SpecctlError as error:
        if not sizes:
            raise
        return sizes, error
    return sizes, None


def _sizes(engine: plugins.Engine, plan: DecodePlan, asked: Asked, reporter: Reporter) -> Iterator[SizeResult]:
    """Every size, turn after turn; later turns go on from what the first size answered."""
    answers: dict[str, list[Answer]] = {row.key: [] for row in asked.dialogues}
    # Before anything starts: a server may take minutes.
    turns = [prompts_of(0, plan, asked, answers=answers, reporter=reporter)]
    refuse_long(turns[0], plan)
    for at, pp in enumerate(plan.config.pp):
        with engine.open(plan, pp, reporter) as decode:
            if not at:
                parts = _first_size(decode, plan, asked, pp, turns=turns, answers=answers, reporter=reporter)
            else:
                parts = [_turn(decode, prompts, pp, reporter) for prompts in turns]
        size = _joined(parts)
        if plan.config.baseline and plan.num_draft_tokens and size.plain_seconds is None:
            size = _with_plain(engine, plan, size, turns, reporter)
        yield size


def _first_size(
    decode: Callable[[Sequence[Prompt]], SizeResult],
    plan: DecodePlan,
    asked: Asked,
    pp: int,
    *,
    turns: list[list[Prompt]],
    answers: Mapping[str, list[Answer]],
    reporter: Reporter,
) -> list[SizeResult]:
    """What became of every turn; `turns` holds the first and gets the others, which follow from the answers."""
    from specctl.core.thoughts import spoken

    parts = []
    for turn in range(plan.config.turns):
        if turn:
            turns.append(prompts_of(turn, plan, asked, answers=answers, reporter=reporter))
        if not turns[turn]:
            turns.pop()
            break
        parts.append(_turn(decode, turns[turn], pp, reporter))
        for result, prompt in zip(parts[-1].results, turns[turn], strict=True):
            text, reasoning = spoken(asked.encoder.tokenizer, result.tokens)
            answers[prompt.key.removesuffix(f"-{turn}")].append(Answer(text, "stop", len(result.tokens), reasoning))
    return parts


def _turn(
    decode: Callable[[Sequence[Prompt]], SizeResult], prompts: Sequence[Prompt], pp: int, reporter: Reporter
) -> SizeResult:
    reporter.note(f"pp {pp}, turn {prompts[0].turn + 1}: {len(prompts)} prompts")
    return decode(prompts)


def _with_plain(
    engine: plugins.Engine, plan: DecodePlan, size: SizeResult, turns: Sequence[Sequence[Prompt]], reporter: Reporter
) -> SizeResult:
    """The same prompts without the draft, where the engine does not time both at once and can start another."""
    if plan.config.endpoint is not None:
        reporter.note("plain decoding is not timed: the server at `--endpoint` runs with its draft")
        return size
    with engine.open(replace(plan, num_draft_tokens=0), size.pp, reporter) as decode:
        parts = [decode(prompts) for prompts in turns]
    tokens = sum(len(result.tokens) for part in parts for result in part.results)
    return replace(size, plain_seconds=sum(part.seconds for part in parts), plain_tokens=tokens)


def _joined(parts: Sequence[SizeResult]) -> SizeResult:
    """One size's turns together."""
    first = parts[0]
    plain = [part.plain_seconds for part in parts if part.plain_seconds is not None]
    plain_tokens = [part.plain_tokens for part in parts if part.plain_tokens is not None]
    sent = [part.bytes_on_wire for part in parts if part.bytes_on_wire is not None]
    return replace(
        first,
        results=tuple(result for part in parts for result in part.results),
        seconds=sum(part.seconds for part in parts),
        plain_seconds=sum(plain) if plain else None,
        plain_tokens=sum(plain_tokens) if plain_tokens else None,
        bytes_on_wire=sum(sent) if sent else None,
    )


def _settings(plan: DecodePlan, asked: Asked) -> dict[str, Any]:
    from specctl.core.prompts import prompt_file

    config = plan.config
    kept = ("prompts", "max_new_tokens", "temperature", "top_p", "top_k", "draft_sampling", "seed", "turns")
    more = ("ignore_eos", "no_spec", "limit", "batch", "tolerance", "engine", "device")
    return {
        "target": config.target,
        "target_weights": plan.spec.weights_fingerprint or None,
        "draft": config.draft,
        "dtype": plan.dtype,
        "num_draft_tokens": plan.num_draft_tokens,
        "prompts_sha256": hashlib.sha256(prompt_file(config.prompts).read_bytes()).hexdigest(),
        "template_sha256": asked.encoder.template_hash,
        **{name: getattr(config, name) for name in (*kept, *more)},
        **plan.facts,
    }
