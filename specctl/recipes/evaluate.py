"""The road from a target, a draft and prompts to a judged acceptance length. Knows no torch at import."""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.errors import DataError, InterruptedRun, NotSupportedError, UsageError
from specctl.records.dialogue import Answer, Dialogue
from specctl.records.evaluation import EvalConfig, EvalResult, PromptResult, SizeResult
from specctl.records.progress import Reporter
from specctl.records.provenance import versions

if TYPE_CHECKING:
    from specctl.core.decodejob import DecodeOutcome
    from specctl.core.prompts import Encoder
    from specctl.records.target import TargetSpec

DEFAULT_DRAFT_TOKENS = 3
SILENCE_S = 20.0
"""A rank that shows no sign of life for so long hangs."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is decoded: the target, its prompts, and how many tokens the draft proposes (0: none)."""

    spec: TargetSpec
    encoder: Encoder
    asked: Sequence[Dialogue]
    num_draft_tokens: int
    stop_ids: tuple[int, ...]
    dtype: str


def evaluate(config: EvalConfig, reporter: Reporter) -> EvalResult:
    """Decode the prompts at every size and count what was accepted.

    Raises SpecctlError for whatever the user or the machine can cause.
    """
    refuse(config)
    try:
        plan = _plan(config, reporter)
        sizes = _sizes(config, plan, reporter)
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
    return EvalResult(_settings(config, plan), versions(), tuple(sizes), baselines)


def refuse(config: EvalConfig) -> None:
    """Raises UsageError for values that have no meaning, before anything is read."""
    for name in ("max_new_tokens", "turns", "batch", "tp"):
        if getattr(config, name) < 1:
            raise UsageError(f"`--{name.replace('_', '-')} {getattr(config, name)}` is not 1 or more")
    for name in ("limit", "num_draft_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"`--{name.replace('_', '-')} {value}` is not 1 or more")
    if config.engine != "reference":
        raise NotSupportedError(
            f"there is no engine `{config.engine}`", hint="`reference` is specctl's own and the only one"
        )
    if not config.pp or min(config.pp) < 1 or len(set(config.pp)) < len(config.pp):
        raise UsageError(f"`--pp` is given as {list(config.pp)}", hint="sizes from 1, each once")
    if config.draft is None and not config.no_spec:
        raise UsageError("there is no DRAFT to measure", hint="name its folder, or decode plainly with `--no-spec`")
    if config.draft is not None and config.no_spec:
        raise UsageError("`--no-spec` decodes without a draft, and one is given", hint="leave one of the two out")
    if config.no_spec and config.num_draft_tokens is not None and not config.baseline:
        raise UsageError("`--num-draft-tokens` with `--no-spec`: nothing is drafted", hint="leave one of the two out")
    if config.draft_sampling not in ("greedy", "sampled"):
        raise UsageError(f"`--draft-sampling {config.draft_sampling}` is none", hint="it is greedy or sampled")
    if config.draft_sampling == "sampled" and config.temperature == 0:
        raise UsageError("`--draft-sampling sampled` needs a `--temperature` above 0")
    if config.report is not None and Path(config.report).is_dir():
        raise UsageError("`--report` is a folder", where=config.report, hint="name a file, as in `--report eval.html`")
    if not 0 <= config.tolerance < 1:
        raise UsageError(f"`--tolerance {config.tolerance}` is not from 0 to below 1")


def _plan(config: EvalConfig, reporter: Reporter) -> _Plan:
    from specctl.core.device import check_device
    from specctl.core.draftload import draft_slots, read_draft
    from specctl.core.parallel import is_torchrun
    from specctl.core.prompts import open_prompts, prompt_file, read_dialogues
    from specctl.core.sampling import Sampler
    from specctl.core.split import check_split
    from specctl.core.target import describe_target
    from specctl.core.teaching import read_parts

    Sampler(config.temperature, config.top_p, config.top_k)
    path = prompt_file(config.prompts)
    spec = describe_target(config.target, revision=config.revision, trust_remote_code=config.trust_remote_code)
    if is_torchrun():
        raise UsageError("`specctl eval` starts its ranks itself, and torchrun started this process", hint="`--pp N`")
    for pp in config.pp:
        check_device(config.device, pp * config.tp)
        if pp > spec.num_layers:
            raise UsageError(f"`--pp {pp}` is more than the target's {spec.num_layers} layers")
        note = check_split(spec, pp=pp, tp=config.tp, trust_remote_code=config.trust_remote_code)
        if note is not None:
            reporter.note(note)
    parts = read_parts(config.target, config.revision)
    tokens = 0
    if config.draft is not None:
        head, _ = read_draft(config.draft, parts)
        draft_slots(head, config.draft)
        tokens = config.num_draft_tokens or head.num_draft_tokens or DEFAULT_DRAFT_TOKENS
    encoder = open_prompts(spec, trust_remote_code=config.trust_remote_code)
    own_end = encoder.tokenizer.eos_token_id
    ends = {*parts.files.facts.eos_token_ids, *([own_end] if isinstance(own_end, int) else [])}
    refused: Counter[str] = Counter()
    asked = read_dialogues(path, config.limit, config.seed, refused=refused)
    if refused:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
        reporter.warn(f"{refused.total()} rows of {path} ask nothing and are left out: {why}")
    return _Plan(
        spec,
        encoder,
        asked,
        tokens,
        () if config.ignore_eos else tuple(sorted(ends)),
        _dtype(config, spec),
    )


def _dtype(config: EvalConfig, spec: TargetSpec) -> str:
    from specctl.core.device import DTYPES

    dtype = spec.compute_dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"`--dtype {config.dtype}` is none", hint=f"one of auto, {', '.join(DTYPES)}")
    return dtype


def _sizes(config: EvalConfig, plan: _Plan, reporter: Reporter) -> list[SizeResult]:
    """Every size, turn after turn; later turns go on from what the first size answered."""
    answers: dict[str, list[Answer]] = {asked.key: [] for asked in plan.asked}
    found: dict[int, list[SizeResult]] = {pp: [] for pp in config.pp}
    for turn in range(config.turns):
        prompts = _prompts(config, plan, answers, reporter)
        if not prompts:
            break
        for pp in config.pp:
            reporter.note(f"pp {pp}, turn {turn + 1}: {len(prompts)} prompts")
            outcome = _decode(config, plan, prompts, turn, pp, reporter)
            found[pp].append(_size_result(config, plan, prompts, turn, pp, outcome))
        for result, (asked, _) in zip(found[config.pp[0]][-1].results, prompts, strict=True):
            text = plan.encoder.tokenizer.decode(result.tokens, skip_special_tokens=True)
            answers[asked.key].append(Answer(text, "stop", len(result.tokens)))
    return [_joined(parts) for parts in found.values()]


def _prompts(
    config: EvalConfig, plan: _Plan, answers: Mapping[str, Sequence[Answer]], reporter: Reporter
) -> list[tuple[Dialogue, tuple[int, ...]]]:
    turn = max(map(len, answers.values()))
    # Drafts are read beyond the last token that counts.
    room = config.max_new_tokens + plan.num_draft_tokens
    prompts, left_out = [], 0
    for asked in plan.asked:
        if len(answers[asked.key]) < turn or asked.num_questions <= turn:
            continue
        ids = plan.encoder.encode(asked, answers[asked.key], room)
        if ids is None:
            left_out += 1
        else:
            prompts.append((asked, ids))
    if left_out:
        reporter.warn(
            f"{left_out} of {left_out + len(prompts)} prompts left out: the target's context has no room for them and "
            f"{room} tokens more, or its chat template refuses them"
        )
    if not prompts and not turn:
        raise DataError("no prompt fits the target", where=config.prompts)
    return prompts


def _decode(
    config: EvalConfig,
    plan: _Plan,
    prompts: Sequence[tuple[Dialogue, tuple[int, ...]]],
    turn: int,
    pp: int,
    reporter: Reporter,
) -> DecodeOutcome:
    from specctl.core.decodejob import DecodeJob, read_outcome
    from specctl.core.launch import run_local
    from specctl.core.sampling import Sampler
    from specctl.core.speculate import DecodeSettings, Request

    settings = DecodeSettings(
        config.max_new_tokens,
        plan.num_draft_tokens,
        plan.stop_ids,
        Sampler(config.temperature, config.top_p, config.top_k),
        config.draft_sampling == "sampled",
        config.seed,
    )
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        job = DecodeJob(
            spec=plan.spec,
            draft=config.draft,
            requests=tuple(Request(f"{asked.key}-{turn}", ids) for asked, ids in prompts),
            settings=settings,
            batch=config.batch,
            dtype=plan.dtype,
            device=config.device,
            out=f"{folder}/outcome",
            is_timed_plain=config.baseline and plan.num_draft_tokens > 0,
            trust_remote_code=config.trust_remote_code,
        )
        run_local(job, pp=pp, tp=config.tp, device=config.device, reporter=reporter, silence_s=SILENCE_S)
        return read_outcome(Path(job.out))


def _size_result(
    config: EvalConfig,
    plan: _Plan,
    prompts: Sequence[tuple[Dialogue, tuple[int, ...]]],
    turn: int,
    pp: int,
    outcome: DecodeOutcome,
) -> SizeResult:
    results = []
    for (asked, ids), decoded in zip(prompts, outcome.decoded, strict=True):
        steps = tuple((step.drafted, step.accepted) for step in decoded.steps)
        result = PromptResult(
            id=asked.row_id,
            category=asked.category,
            turn=turn,
            prompt_ids=ids,
            tokens=decoded.tokens,
            num_drafts=0,
            proposed=(),
            accepted=(),
            steps=steps,
            stop_reason="eos" if decoded.is_stopped else "length",
            gaps=decoded.gaps or None,
        )
        counts = result.counts()
        results.append(
            replace(result, num_drafts=counts.num_drafts, proposed=counts.proposed, accepted=counts.accepted)
        )
    plain = sum(len(decoded.tokens) for decoded in outcome.plain) if outcome.plain else None
    return SizeResult(pp, config.tp, tuple(results), outcome.seconds, outcome.plain_seconds, plain, outcome.bytes_sent)


def _joined(parts: Sequence[SizeResult]) -> SizeResult:
    """One size's turns together."""
    first = parts[0]
    plain = [part.plain_seconds for part in parts if part.plain_seconds is not None]
    plain_tokens = [part.plain_tokens for part in parts if part.plain_tokens is not None]
    return replace(
        first,
        results=tuple(result for part in parts for result in part.results),
        seconds=sum(part.seconds for part in parts),
        plain_seconds=sum(plain) if plain else None,
        plain_tokens=sum(plain_tokens) if plain_tokens else None,
        bytes_on_wire=sum(part.bytes_on_wire or 0 for part in parts),
    )


def _settings(config: EvalConfig, plan: _Plan) -> dict[str, Any]:
    from specctl.core.prompts import prompt_file

    kept = ("prompts", "max_new_tokens", "temperature", "top_p", "top_k", "draft_sampling", "seed", "turns")
    more = ("ignore_eos", "no_spec", "limit", "batch", "tolerance", "engine", "device")
    return {
        "target": config.target,
        "target_weights": plan.spec.weights_fingerprint,
        "draft": config.draft,
        "dtype": plan.dtype,
        "num_draft_tokens": plan.num_draft_tokens,
        "prompts_sha256": hashlib.sha256(prompt_file(config.prompts).read_bytes()).hexdigest(),
        "template_sha256": plan.encoder.template_hash,
        **{name: getattr(config, name) for name in (*kept, *more)},
    }
