"""Before an evaluation starts: what is refused, what is decoded, and the prompts. Knows no torch at import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl import plugins
from specctl.errors import DataError, UsageError
from specctl.recipes.served import refuse_server_options
from specctl.records.dialogue import Answer, Dialogue
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt
from specctl.records.progress import Reporter

if TYPE_CHECKING:
    from specctl.core.prompts import Encoder
    from specctl.records.head import HeadConfig
    from specctl.records.target import TargetSpec

DEFAULT_DRAFT_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """The rows of the prompts file and what makes token ids of them."""

    dialogues: Sequence[Dialogue]
    encoder: Encoder


def refuse(config: EvalConfig) -> None:
    """Raises UsageError for values that have no meaning, before anything is read."""
    for name in ("max_new_tokens", "turns", "batch", "tp"):
        if getattr(config, name) < 1:
            raise UsageError(f"`--{name.replace('_', '-')} {getattr(config, name)}` is not 1 or more")
    for name in ("limit", "num_draft_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"`--{name.replace('_', '-')} {value}` is not 1 or more")
    if not config.pp or min(config.pp) < 1 or len(set(config.pp)) < len(config.pp):
        raise UsageError(f"`--pp` is given as {list(config.pp)}", hint="sizes from 1, each once")
    _refuse_draft(config)
    if config.api_key_env is not None and config.endpoint is None:
        raise UsageError("`--api-key-env` is for an `--endpoint`, and none is given", hint="leave it out")
    if config.draft_sampling not in ("greedy", "sampled"):
        raise UsageError(f"`--draft-sampling {config.draft_sampling}` is none", hint="it is greedy or sampled")
    if config.draft_sampling == "sampled" and config.temperature == 0:
        raise UsageError("`--draft-sampling sampled` needs a `--temperature` above 0")
    if config.report is not None and Path(config.report).is_dir():
        raise UsageError("`--report` is a folder", where=config.report, hint="name a file, as in `--report eval.html`")
    if not 0 <= config.tolerance < 1:
        raise UsageError(f"`--tolerance {config.tolerance}` is not from 0 to below 1")
    refuse_server_options(config, EvalConfig("", None, ""))
    plugins.load_engine(config.engine).refuse(config)


def _refuse_draft(config: EvalConfig) -> None:
    if config.draft is None and not config.no_spec and config.endpoint is None:
        raise UsageError("there is no DRAFT to measure", hint="name its folder, or decode plainly with `--no-spec`")
    if config.draft is not None and config.no_spec:
        raise UsageError("`--no-spec` decodes without a draft, and one is given", hint="leave one of the two out")
    if config.no_spec and config.num_draft_tokens is not None and not config.baseline:
        raise UsageError("`--num-draft-tokens` with `--no-spec`: nothing is drafted", hint="leave one of the two out")


def make_plan(config: EvalConfig, reporter: Reporter) -> tuple[DecodePlan, Asked]:
    """What the engine is to run, and the prompts. Raises SpecctlError for what the files do not give."""
    from specctl.core.draftload import draft_slots, read_draft
    from specctl.core.prompts import open_prompts, prompt_file, read_dialogues
    from specctl.core.target import describe_target
    from specctl.core.teaching import read_parts
    from specctl.files.target import read_target

    path = prompt_file(config.prompts)
    spec = describe_target(
        config.target,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        # A server that runs elsewhere has the weights; here its tokenizer will do.
        is_whole=config.endpoint is None,
    )
    tokens, head = 0, None
    # A server that runs already has read its draft, and says how much it drafts.
    if config.draft is not None and config.endpoint is None:
        head, _ = read_draft(config.draft, read_parts(config.target, config.revision))
        draft_slots(head, config.draft)
        tokens = config.num_draft_tokens or head.num_draft_tokens or DEFAULT_DRAFT_TOKENS
        _warn_depth(head, tokens, reporter)
    encoder = open_prompts(spec, trust_remote_code=config.trust_remote_code)
    own_end = encoder.tokenizer.eos_token_id
    ends = {*read_target(Path(spec.path)).facts.eos_token_ids, *([own_end] if isinstance(own_end, int) else [])}
    refused: Counter[str] = Counter()
    asked = read_dialogues(path, config.limit, config.seed, refused=refused)
    if refused:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
        reporter.warn(f"{refused.total()} rows of {path} ask nothing and are left out: {why}")
    stop_ids = () if config.ignore_eos else tuple(sorted(ends))
    plan = DecodePlan(config, spec, head, tokens, stop_ids, _dtype(config, spec))
    return plan, Asked(asked, encoder)


def _warn_depth(head: HeadConfig, tokens: int, reporter: Reporter) -> None:
    """A P-EAGLE head guesses past its depths by nothing it learned; an EAGLE-3 head goes on by itself."""
    trained = head.num_draft_tokens
    if trained is not None and tokens > trained:
        how = "learned nothing about the rest" if head.parallel_drafting else "guesses the rest from its own guesses"
        reporter.warn(f"`--num-draft-tokens {tokens}`: the draft was trained for {trained} and {how}")


def _dtype(config: EvalConfig, spec: TargetSpec) -> str:
    from specctl.core.device import DTYPES

    dtype = spec.compute_dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"`--dtype {config.dtype}` is none", hint=f"one of auto, {', '.join(DTYPES)}")
    return dtype


def prompts_of(
    turn: int,
    plan: DecodePlan,
    asked: Asked,
    *,
    answers: Mapping[str, Sequence[Answer]],
    reporter: Reporter,
) -> list[Prompt]:
    """What is asked in this turn, after `answers` by row. Raises DataError when the first turn asks nothing."""
    # Drafts are read beyond the last token that counts.
    room = plan.config.max_new_tokens + plan.num_draft_tokens
    prompts, left_out = [], 0
    for row in asked.dialogues:
        if len(answers[row.key]) < turn or row.num_questions <= turn:
            continue
        ids = asked.encoder.encode(row, answers[row.key], room)
        if ids is None:
            left_out += 1
        else:
            prompts.append(Prompt(f"{row.key}-{turn}", row.row_id, row.category, turn, ids))
    if left_out:
        reporter.warn(
            f"{left_out} of {left_out + len(prompts)} prompts left out: the target's context has no room for them and "
            f"{room} tokens more, or its chat template refuses them"
        )
    if not prompts and not turn:
        raise DataError("no prompt fits the target", where=plan.config.prompts)
    return prompts
