"""The first talk with a vLLM server: what it serves, what it tells of drafts, and whether it is what was asked for.

Source: vLLM 0.32.0, entrypoints/openai/models/serving.py and entrypoints/serve/tokenize/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from specctl.engines._client import Client, NoAnswer, get_json, get_text, post_json
from specctl.engines._counters import Counters, read_counters, tells_work
from specctl.engines._serving import WARM_TOKENS, WARM_UP, Server, is_target
from specctl.engines._vllmanswer import PATH, body_of, ids_of, read_answer, read_drafts
from specctl.engines._vllmprogram import SERVED_NAME
from specctl.errors import MachineError, TargetError
from specctl.records.evaluation import DecodePlan, Prompt
from specctl.records.progress import Reporter

METRICS: Final = "/metrics"
MODELS: Final = "/v1/models"
TOKENIZE: Final = "/tokenize"
PROBE: Final = "The tide's 3.14 metres; def f(x):\n    return x**2  # d\u00e9j\u00e0 vu \u6f6e\u6c50"
"""A text that tokenizers cut in different ways."""

NOT_TOLD: Final = (
    "start the server with `--per-request-spec-decode-metrics detailed`, or without `--disable-log-stats`, and with "
    "`--speculative-config`"
)


@dataclass(frozen=True, slots=True)
class Served:
    """A model by its name in requests; `room` is the longest text it takes, None where the server does not say."""

    name: str
    root: str
    room: int | None


@dataclass(frozen=True, slots=True)
class Session:
    """A server that was greeted: what it serves, what it tells of one request, and how much it drafts.

    `is_told` says whether it tells at all if it drafts.
    """

    server: Server
    model: Served
    has_ids: bool
    tells_requests: bool
    num_draft_tokens: int
    is_told: bool


def greet(server: Server, plan: DecodePlan) -> Session:
    """A short request that is not counted: it warms the server up and shows what it tells.

    Raises MachineError for another server than the one that was started.
    """
    model = _served(server, plan)
    config = replace(plan.config, max_new_tokens=WARM_TOKENS)
    short = replace(plan, config=config, stop_ids=())
    prompt = Prompt("warm-up", "warm-up", None, 0, WARM_UP)
    where = server.client.url + PATH
    has_ids = True
    found = post_json(server.client, PATH, body_of(short, prompt, model=model.name, has_ids=True))
    if not ids_of(_first(found)):
        has_ids = False
        found = post_json(server.client, PATH, body_of(short, prompt, model=model.name, has_ids=False))
    read_answer(found, short, where)
    drafts = read_drafts(found, where)
    if drafts is not None:
        return Session(server, model, has_ids, True, drafts.num_spec_tokens, True)
    text, metrics = get_text(server.client, METRICS), server.client.url + METRICS
    counters = None if text is None else read_counters(text, metrics)
    if counters is None and plan.num_draft_tokens:
        raise MachineError("the server tells nothing of drafts", where=metrics, hint=NOT_TOLD)
    served = len(counters.per_position) if counters is not None else 0
    return Session(server, model, has_ids, False, served, text is not None and tells_work(text, metrics))


def is_vllm(client: Client) -> bool:
    """Whether a server answers as vLLM does."""
    try:
        data = get_json(client, MODELS).get("data") if get_text(client, "/version") is not None else None
    except MachineError:
        return False
    models = data if isinstance(data, list) else []
    return any(isinstance(model, Mapping) and model.get("owned_by") == "vllm" for model in models)


def scrape(client: Client) -> Counters | None:
    """The server's counters, None where it publishes none of speculation."""
    text = get_text(client, METRICS)
    return None if text is None else read_counters(text, client.url + METRICS)


def compare_target(session: Session, plan: DecodePlan, reporter: Reporter) -> None:
    """Raises MachineError for a server at `--endpoint` that plainly serves another target, warns where it may."""
    model, client = session.model, session.server.client
    if is_target(plan, model.name, model.root):
        return
    both = f"the server serves `{model.name}` from `{model.root}`, and TARGET is `{plan.config.target}`"
    theirs, ours = _their_ids(client, model), _our_ids(plan)
    if theirs is None or ours is None:
        reporter.warn(f"{both}: whether they are one model cannot be told")
    elif theirs != ours:
        raise MachineError(f"{both}: they read one text as different tokens", where=client.url, hint="name its target")
    else:
        reporter.warn(f"{both}: they share a tokenizer, and whether they are one model cannot be told")


def _their_ids(client: Client, model: Served) -> list[int] | None:
    """How the server reads the probe, None where it does not say."""
    try:
        found = post_json(client, TOKENIZE, {"model": model.name, "prompt": PROBE, "add_special_tokens": False})
    except NoAnswer:
        raise
    except MachineError:
        return None
    ids = found.get("tokens")
    return ids if isinstance(ids, list) else None


def _our_ids(plan: DecodePlan) -> list[int] | None:
    """How the target's tokenizer reads the probe, None where the target has none."""
    from specctl.core.target import load_tokenizer

    try:
        tokenizer = load_tokenizer(plan.spec, trust_remote_code=plan.config.trust_remote_code)
    except TargetError:
        return None
    return list(tokenizer.encode(PROBE, add_special_tokens=False))


def _first(found: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = found.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


def _served(server: Server, plan: DecodePlan) -> Served:
    """The target among what the server serves. Raises MachineError where there is none, or several and none fits."""
    data = get_json(server.client, MODELS).get("data")
    models = [model for model in data if isinstance(model, Mapping)] if isinstance(data, list) else []
    roots = [_model(model) for model in models if "id" in model and not model.get("parent")]
    names, where = ", ".join(model.name for model in roots), server.client.url + MODELS
    if server.process is not None:
        ours = [model for model in roots if model.name == SERVED_NAME]
        if not ours:
            raise MachineError(
                f"the server serves {names or 'no model'}, and the one that was started serves {SERVED_NAME}",
                where=where,
                hint="another server took its port, or `--server-args` gives the model another name: run again without",
            )
        return ours[0]
    fitting = [model for model in roots if is_target(plan, model.name, model.root)]
    if len({model.root for model in roots}) == 1 or fitting:
        return (fitting or roots)[0]
    raise MachineError(
        f"the server serves {names or 'no model'}, and TARGET is `{plan.config.target}`",
        where=where,
        hint="name TARGET as the server does",
    )


def _model(found: Mapping[str, Any]) -> Served:
    room = found.get("max_model_len")
    return Served(str(found["id"]), str(found.get("root")), room if type(room) is int else None)
