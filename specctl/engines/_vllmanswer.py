"""What vLLM is asked and what it answers: token ids and what became of their drafts.

Source: vLLM 0.32.0 and 0.33.0, entrypoints/openai/completion/protocol.py, entrypoints/generate/base/protocol.py
and v1/metrics/stats.py. `token_ids` hold the token that ended the text; drafts are counted before it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specctl.engines._drafts import are_counts, check_gained, gained_tokens, histogram_result, named_steps, plain_result
from specctl.engines._serving import seed_of
from specctl.errors import MachineError
from specctl.records.evaluation import DecodePlan, Prompt, PromptResult, told

PATH: Final = "/v1/completions"
ID_PREFIX: Final = "token_id:"


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of one answer's drafts. `steps` are (drafted, accepted), None where only the histogram is told:
    how many steps kept 0, 1, ... drafts."""

    num_spec_tokens: int
    histogram: tuple[int, ...]
    steps: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """One text. `drafts` is None where the server tells nothing for single requests."""

    tokens: tuple[int, ...]
    drafts: Drafts | None


def body_of(plan: DecodePlan, prompt: Prompt, *, model: str, has_ids: bool) -> dict[str, Any]:
    """The request. `has_ids`: the server knows `return_token_ids`."""
    config = plan.config
    body = {
        "model": model,
        "prompt": list(prompt.ids),
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "seed": seed_of(config, prompt),
        # It stops where the plan says and nowhere else: the server would add ends of its own.
        "ignore_eos": True,
        "stop_token_ids": list(plan.stop_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    return body if has_ids else {**body, "logprobs": 0, "return_tokens_as_token_ids": True}


def read_answer(found: Mapping[str, Any], plan: DecodePlan, where: str) -> Answer:
    """Raises MachineError for an answer without token ids, or one that ended for another reason than the plan's."""
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping):
        raise MachineError("the server's answer holds no `choices`", where=where)
    tokens = ids_of(choice)
    if not tokens:
        raise MachineError(
            "the server's answer holds no token ids: neither `token_ids` nor `logprobs.tokens`",
            where=where,
            hint="vLLM 0.10.2 and newer give them",
        )
    is_whole = len(tokens) == plan.config.max_new_tokens or tokens[-1] in plan.stop_ids
    if not is_whole:
        reason = choice.get("finish_reason")
        raise MachineError(f"the server ended an answer after {len(tokens)} tokens, and says `{reason}`", where=where)
    return Answer(tokens, read_drafts(found, where))


def ids_of(choice: Mapping[str, Any]) -> tuple[int, ...]:
    """The token ids of a choice, in either of the two ways; empty where it holds none."""
    ids = choice.get("token_ids")
    if are_counts(ids):
        return tuple(ids)
    logprobs = choice.get("logprobs")
    texts = logprobs.get("tokens") if isinstance(logprobs, Mapping) else None
    if not isinstance(texts, list) or not all(isinstance(t, str) and t.startswith(ID_PREFIX) for t in texts):
        return ()
    numbers = [text.removeprefix(ID_PREFIX) for text in texts]
    return tuple(map(int, numbers)) if all(number.isdigit() for number in numbers) else ()


def read_drafts(found: Mapping[str, Any], where: str) -> Drafts | None:
    """`metrics.speculative_decoding`, None where the answer has none. Raises MachineError naming a field it lacks."""
    metrics = found.get("metrics")
    spec = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    if spec is None:
        return None
    if not isinstance(spec, Mapping):
        raise MachineError("`metrics.speculative_decoding` is no object", where=where)
    histogram = spec.get("acceptance_histogram")
    longest = spec.get("num_spec_tokens")
    if not are_counts(histogram) or type(longest) is not int:
        raise MachineError(
            "`metrics.speculative_decoding` is to hold `acceptance_histogram` and `num_spec_tokens`, and holds "
            f"{', '.join(sorted(map(str, spec)))}",
            where=where,
        )
    if len(histogram) > longest + 1:
        raise MachineError(f"drafts of up to {longest} tokens cannot have the histogram {histogram}", where=where)
    return Drafts(longest, tuple(histogram), _steps(spec, longest, histogram, where))


def _steps(
    spec: Mapping[str, Any], longest: int, histogram: Sequence[int], where: str
) -> tuple[tuple[int, int], ...] | None:
    accepted, drafted = spec.get("per_step_accepted"), spec.get("per_step_drafted")
    if accepted is None and drafted is None:
        return () if not sum(histogram) else None
    if not (are_counts(accepted) and are_counts(drafted) and len(accepted) == len(drafted)):
        raise MachineError("`per_step_accepted` and `per_step_drafted` are no two lists of one length", where=where)
    if any(kept > of for kept, of in zip(accepted, drafted, strict=True)):
        raise MachineError("`per_step_accepted` tells of more tokens than `per_step_drafted`", where=where)
    if max(drafted, default=0) > longest:
        raise MachineError(f"`per_step_drafted` holds more than `num_spec_tokens: {longest}`", where=where)
    if any(accepted.count(kept) != count for kept, count in enumerate(histogram)) or len(accepted) != sum(histogram):
        raise MachineError("`per_step_accepted` and `acceptance_histogram` tell of other steps", where=where)
    return tuple(zip(drafted, accepted, strict=True))


def result_of(answer: Answer, plan: DecodePlan, prompt: Prompt, where: str) -> PromptResult:
    """What one answer tells of its drafts. Raises MachineError where its parts contradict each other."""
    if not plan.num_draft_tokens:
        return plain_result(plan, prompt, answer.tokens)
    drafts = answer.drafts
    if drafts is None and len(answer.tokens) > 1:
        raise MachineError("the server told of drafts in its first answer and does not in this one", where=where)
    if drafts is not None and drafts.num_spec_tokens != plan.num_draft_tokens:
        raise MachineError(
            f"the server drafts {drafts.num_spec_tokens} tokens in one answer and {plan.num_draft_tokens} in others",
            where=where,
        )
    # A text that ends with its first token has verified nothing, and one beyond the draft's room was never drafted.
    if drafts is None or not any(drafts.histogram):
        return plain_result(plan, prompt, answer.tokens)
    check_gained(gained_tokens(drafts.histogram), len(answer.tokens), plan, where)
    if drafts.steps is None:
        return histogram_result(plan, prompt, answer.tokens, drafts.histogram)
    steps = named_steps(answer.tokens, drafts.steps)
    return told(prompt, answer.tokens, steps, is_stopped=answer.tokens[-1] in plan.stop_ids)
