"""specctl's own engine: any causal LM of transformers, with the draft on the last pipeline stage.

What decodes is core/; this file says what it is asked and what came of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specctl.core.decodejob import DecodeJob, DecodeOutcome, read_outcome
from specctl.core.device import check_device
from specctl.core.launch import run_local
from specctl.core.parallel import is_torchrun
from specctl.core.sampling import Sampler
from specctl.core.speculate import Decoded, DecodeSettings, Request
from specctl.core.split import check_split
from specctl.errors import UsageError
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt, PromptResult, SizeResult, told
from specctl.records.progress import Reporter

TITLE = "specctl's own engine"
IS_SERVER = False

SILENCE_S = 20.0
"""A rank that shows no sign of life for so long hangs."""


def refuse(config: EvalConfig) -> None:
    """Raises UsageError for a sampler that is none, and under torchrun."""
    _sampler(config)
    if is_torchrun():
        raise UsageError("`specctl eval` starts its ranks itself, and torchrun started this process", hint="`--pp N`")


def ready(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """The plan as it is. Raises SpecctlError for sizes that the machine or the target cannot run."""
    config, spec = plan.config, plan.spec
    for pp in config.pp:
        check_device(config.device, pp * config.tp)
        if pp > spec.num_layers:
            raise UsageError(f"`--pp {pp}` is more than the target's {spec.num_layers} layers")
        note = check_split(spec, pp=pp, tp=config.tp, trust_remote_code=config.trust_remote_code)
        if note is not None:
            reporter.note(note)
    return plan


@contextmanager
def open(plan: DecodePlan, pp: int, reporter: Reporter) -> Iterator[Callable[[Sequence[Prompt]], SizeResult]]:
    """Ranks are started for each call: nothing runs between two."""
    yield lambda prompts: _decode(plan, prompts, pp, reporter)


def _decode(plan: DecodePlan, prompts: Sequence[Prompt], pp: int, reporter: Reporter) -> SizeResult:
    config = plan.config
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        job = _job(plan, prompts, f"{folder}/outcome")
        run_local(job, pp=pp, tp=config.tp, device=config.device, reporter=reporter, silence_s=SILENCE_S)
        outcome = read_outcome(Path(job.out))
    return _size_result(outcome, prompts, pp, config.tp)


def _job(plan: DecodePlan, prompts: Sequence[Prompt], out: str) -> DecodeJob:
    config = plan.config
    settings = DecodeSettings(
        config.max_new_tokens,
        plan.num_draft_tokens,
        plan.stop_ids,
        _sampler(config),
        config.draft_sampling == "sampled",
        config.seed,
    )
    return DecodeJob(
        spec=plan.spec,
        draft=config.draft,
        requests=tuple(Request(prompt.key, prompt.ids) for prompt in prompts),
        settings=settings,
        batch=config.batch,
        dtype=plan.dtype,
        device=config.device,
        out=out,
        is_timed_plain=config.baseline and plan.num_draft_tokens > 0,
        trust_remote_code=config.trust_remote_code,
    )


def _sampler(config: EvalConfig) -> Sampler:
    return Sampler(config.temperature, config.top_p, config.top_k)


def _size_result(outcome: DecodeOutcome, prompts: Sequence[Prompt], pp: int, tp: int) -> SizeResult:
    results = tuple(map(_result, prompts, outcome.decoded))
    plain = sum(len(decoded.tokens) for decoded in outcome.plain) if outcome.plain else None
    return SizeResult(pp, tp, results, outcome.seconds, outcome.plain_seconds, plain, outcome.bytes_sent)


def _result(prompt: Prompt, decoded: Decoded) -> PromptResult:
    steps = tuple((step.drafted, step.accepted) for step in decoded.steps)
    return told(prompt, decoded.tokens, steps, is_stopped=decoded.is_stopped, gaps=decoded.gaps or None)
