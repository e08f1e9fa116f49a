"""SGLang as a server, started for each size or attached to. It is another program and never imported.

Nothing of it was run for this file: fields and options were read in the sources of SGLang 0.5.10 and 0.5.23
(managers/tokenizer_manager.py, managers/schedule_batch.py, sampling/sampling_params.py, entrypoints/http_server.py).

Only what an answer's `meta_info` says of its own request is used. SGLang's `spec_accept_length` divides all new
tokens by the verifying steps, and so counts the token of the prompt's forward, which no draft gained; its gauges are
means over the server's life. Here the length is 1 + accepted drafts / verifying steps, from the histogram.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from specctl.engines._client import Client, ask_all, get_json, get_text, post_json
from specctl.engines._command import (
    check_command,
    draft_folder,
    find_program,
    no_package,
    package_of,
    python_beside,
    python_of,
    shown,
    value_of,
    venv_python,
    words,
)
from specctl.engines._drafts import are_counts, check_gained, gained_tokens, histogram_result, plain_result
from specctl.engines._serving import (
    SGLANG_INFO,
    WARM_TOKENS,
    WARM_UP,
    Server,
    attached,
    endpoint_client,
    explained,
    is_target,
    note_labels,
    other_kind,
    refuse_long,
    refuse_options,
    seed_of,
    started,
    take_draft_tokens,
)
from specctl.engines._vllmgreeting import is_vllm
from specctl.errors import MachineError, NotSupportedError, UsageError
from specctl.files.serverview import sglang_speculation
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt, PromptResult, SizeResult
from specctl.records.progress import Reporter

TITLE = "SGLang"
IS_SERVER = True

HEALTH: Final = "/health"
PATH: Final = "/generate"
HISTOGRAM: Final = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""Steps that accepted 0, 1, ... drafts, by its name in 0.5.23 and in 0.5.10."""

STEPS: Final = "spec_verify_ct"

SEEDED: Final = "--enable-deterministic-inference"
"""Without it SGLang drops `sampling_seed`. Source: docs.sglang.io, Deterministic Inference."""


def refuse(config: EvalConfig) -> None:
    """Raises UsageError or NotSupportedError for what no SGLang can be asked."""
    refuse_options(config, TITLE)
    if config.draft_sampling == "sampled":
        raise NotSupportedError(
            "`--draft-sampling sampled`: a chain of SGLang's drafts is of their likeliest tokens", hint="leave it out"
        )


def ready(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """The plan with SGLang's version and what it drafts. Raises SpecctlError where it cannot do what is asked."""
    if plan.config.endpoint is not None:
        return _greeted_plan(plan, reporter)
    if plan.head is not None and plan.head.parallel_drafting:
        # Needs no server to know it.
        raise NotSupportedError(
            "SGLang cannot run P-EAGLE heads (PARALLEL_SGLANG)",
            where=plan.config.draft,
            hint="measure it with `--engine vllm`, from vLLM 0.16 on",
        )
    command, version = find_sglang(plan.config)
    if version is None:
        reporter.note("SGLang's version is not known before it runs: the newest release is taken for granted")
    given = [*command, *words(plan.config.server_args, "server_args")]
    _note_draws(plan, reporter, is_seeded=value_of(given, SEEDED) is not None)
    return replace(
        plan,
        facts={**plan.facts, "server": shown(command)},
        versions={**plan.versions, **({} if version is None else {"sglang": version})},
    )


def _greeted_plan(plan: DecodePlan, reporter: Reporter) -> DecodePlan:
    """As the server at `--endpoint` runs it."""
    with attached(plan, TITLE, HEALTH) as server:
        info = _info(server.client)
    version = info.get("version")
    path = str(info.get("model_path"))
    reporter.note(f"{server.client.url} is SGLang {version} and serves `{path}`")
    if not is_target(plan, path, str(info.get("served_model_name"))):
        reporter.warn(
            f"the server serves `{path}`, and TARGET is `{plan.config.target}`: whether they are one model cannot be "
            "told"
        )
    note_labels(plan.config, reporter)
    _note_draws(plan, reporter, is_seeded=bool(info.get("enable_deterministic_inference")))
    return replace(
        plan,
        num_draft_tokens=take_draft_tokens(plan, _served_tokens(info, server.client.url)),
        facts={**plan.facts, "server": endpoint_client(plan).url, "dtype": None},
        versions={**plan.versions, **({"sglang": version} if isinstance(version, str) else {})},
    )


def _note_draws(plan: DecodePlan, reporter: Reporter, *, is_seeded: bool) -> None:
    if plan.config.temperature > 0 and not is_seeded:
        reporter.note(f"SGLang's draws do not follow `--seed` unless it is started with `{SEEDED}`")


@contextmanager
def open(plan: DecodePlan, pp: int, reporter: Reporter) -> Iterator[Callable[[Sequence[Prompt]], SizeResult]]:
    """A server for one size; it answers until the end."""
    with _server(plan, pp, reporter) as server, explained(server):
        info = _info(server.client)
        if server.process is not None:
            require_ours(info, plan, server.client.url)
        served = _served_tokens(info, server.client.url)
        if served != plan.num_draft_tokens:
            raise MachineError(
                f"the server drafts {served} tokens, and {plan.num_draft_tokens} were to be drafted",
                where=server.client.url,
                hint="does `--server-args` change them? `--num-draft-tokens` says how many",
            )
        short = replace(plan, config=replace(plan.config, max_new_tokens=WARM_TOKENS), stop_ids=())
        _ask(short, server.client, Prompt("warm-up", "warm-up", None, 0, WARM_UP))
        room = info.get("context_length")
        yield lambda prompts: _decode(server, plan, prompts, pp, reporter, room=room if type(room) is int else None)


def _server(plan: DecodePlan, pp: int, reporter: Reporter) -> AbstractContextManager[Server]:
    if plan.config.endpoint is not None:
        return attached(plan, TITLE, HEALTH)
    command, _ = find_sglang(plan.config)
    return started(serve_command(command, plan, pp), plan, TITLE, HEALTH, reporter)


def find_sglang(config: EvalConfig) -> tuple[list[str], str | None]:
    """The command that the options name, else that of the environment on the PATH, and its version."""
    command = words(config.server_command, "server_command")
    if not command:
        python = _of_venv(config.server_venv) if config.server_venv else python_beside(find_program("sglang", TITLE))
        if python is None:
            raise UsageError("there is no `python` beside `sglang`", hint="say how to start it with `--server-command`")
        command = [str(python), "-m", "sglang.launch_server"]
    check_command(command)
    its_python = python_of(command)
    package = package_of(its_python, "sglang") if its_python is not None else None
    return command, package[1] if package is not None else None


def _of_venv(venv: str) -> Path:
    python = venv_python(venv, TITLE)
    if package_of([str(python)], "sglang") is None:
        raise no_package(TITLE, f"the virtual environment {venv} holds no SGLang: it has no package `sglang`")
    return python


def serve_command(command: Sequence[str], plan: DecodePlan, pp: int) -> list[str]:
    """What starts the server for one size, but for host, port and what the user adds."""
    config = plan.config
    full = [*command, "--model-path", str(Path(plan.spec.path).absolute()), "--dtype", plan.dtype]
    full += ["--pp-size", str(pp), "--tp-size", str(config.tp), "--max-running-requests", str(config.batch)]
    full.append("--disable-radix-cache")
    if config.trust_remote_code:
        full.append("--trust-remote-code")
    if plan.num_draft_tokens and config.draft is not None:
        full += sglang_speculation(draft_folder(config.draft), plan.num_draft_tokens)
    return full


def _info(client: Client) -> Mapping[str, Any]:
    """What the server says of itself. Raises MachineError where it says nothing."""
    path = next((path for path in SGLANG_INFO if get_text(client, path) is not None), None)
    if path is None:
        raise other_kind(client, SGLANG_INFO[0], TITLE, "vllm" if is_vllm(client) else None)
    return get_json(client, path)


def _served_tokens(info: Mapping[str, Any], where: str) -> int:
    """How many tokens the server drafts, 0 for none. Raises NotSupportedError for trees of drafts."""
    if "speculative_algorithm" not in info:
        raise MachineError("the server's information lacks `speculative_algorithm`", where=where)
    if not info["speculative_algorithm"]:
        return 0
    drafted, width = info.get("speculative_num_draft_tokens"), info.get("speculative_eagle_topk")
    if width not in (None, 1):
        raise NotSupportedError(
            f"the server drafts trees ({width} tokens wide), and positions in a tree are not counted",
            where=where,
            hint="start it with `--speculative-eagle-topk 1`",
        )
    if type(drafted) is not int or drafted < 2:
        raise MachineError(f"the server says `speculative_num_draft_tokens: {drafted}`", where=where)
    return drafted - 1


def require_ours(info: Mapping[str, Any], plan: DecodePlan, where: str) -> None:
    """Raises MachineError for another server than the one that was started."""
    path = info.get("model_path")
    if not isinstance(path, str) or Path(path).resolve() != Path(plan.spec.path).resolve():
        raise MachineError(
            f"the server serves `{path}`, and the one that was started serves `{plan.spec.path}`",
            where=where,
            hint="another server took its port, or `--server-args` names another model: run again without",
        )


def _decode(
    server: Server, plan: DecodePlan, prompts: Sequence[Prompt], pp: int, reporter: Reporter, *, room: int | None
) -> SizeResult:
    refuse_long(prompts, plan, room, server)
    reporter.start("decoding", len(prompts), "prompts")
    began = time.monotonic()
    results = ask_all(
        lambda client, prompt: _ask(plan, client, prompt), prompts, server.client, plan.config.batch, reporter
    )
    seconds = time.monotonic() - began
    reporter.stop()
    return SizeResult(pp, plan.config.tp, tuple(results), seconds)


def _ask(plan: DecodePlan, client: Client, prompt: Prompt) -> PromptResult:
    return read_result(post_json(client, PATH, body_of(plan, prompt)), plan, prompt, client.url + PATH)


def body_of(plan: DecodePlan, prompt: Prompt) -> dict[str, Any]:
    """The request. SGLang looks at no stop token where it is to ignore its own."""
    config = plan.config
    sampling = {
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "sampling_seed": seed_of(config, prompt),
        "ignore_eos": not plan.stop_ids,
        "stop_token_ids": list(plan.stop_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    return {"input_ids": list(prompt.ids), "sampling_params": sampling}


def read_result(found: Mapping[str, Any], plan: DecodePlan, prompt: Prompt, where: str) -> PromptResult:
    """What one answer tells. Raises MachineError naming a field it lacks, or where its parts contradict each other."""
    meta, ids = found.get("meta_info"), found.get("output_ids")
    if not isinstance(meta, Mapping):
        raise MachineError("the server's answer holds no `meta_info`", where=where)
    if not ids or not are_counts(ids):
        raise MachineError("the server's answer holds no token ids in `output_ids`", where=where)
    tokens = tuple(ids)
    if len(tokens) != plan.config.max_new_tokens and tokens[-1] not in plan.stop_ids:
        reason = meta.get("finish_reason")
        raise MachineError(f"the server ended an answer after {len(tokens)} tokens, and says `{reason}`", where=where)
    # A text that ends with its first token has verified nothing, and SGLang then leaves the fields out.
    if not plan.num_draft_tokens or len(tokens) == 1:
        return plain_result(plan, prompt, tokens)
    histogram = _histogram(meta, plan.num_draft_tokens, where)
    if not any(histogram):
        return plain_result(plan, prompt, tokens)
    check_gained(gained_tokens(histogram), len(tokens), plan, where)
    return histogram_result(plan, prompt, tokens, histogram)


def _histogram(meta: Mapping[str, Any], longest: int, where: str) -> list[int]:
    """How many steps accepted 0, 1, ... drafts."""
    found = next((meta[name] for name in HISTOGRAM if name in meta), None)
    steps = meta.get(STEPS)
    if found is None or steps is None:
        missing = f"`{STEPS}`" if steps is None else " or ".join(f"`{name}`" for name in HISTOGRAM)
        raise MachineError(
            f"`meta_info` lacks {missing}: the server tells nothing of this request's drafts",
            where=where,
            hint="SGLang 0.5.10 and newer tell it when they run with `--speculative-algorithm EAGLE3`",
        )
    if not are_counts(found) or len(found) > longest + 1 or sum(found) != steps:
        raise MachineError(f"{steps} steps of up to {longest} drafts cannot have the histogram {found}", where=where)
    return list(found)
