"""What recipes share about engines that are servers: whose options they are, and states that one hands out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from specctl import plugins
from specctl.errors import UsageError
from specctl.recipes.check import look_at
from specctl.recipes.serve import said_tokens
from specctl.records.check import CheckConfig
from specctl.records.evaluation import SHORTER, DecodePlan, EvalConfig, Prompt, too_long
from specctl.records.extraction import ExtractConfig, StatesPlan
from specctl.records.progress import Reporter
from specctl.records.target import TargetSpec

if TYPE_CHECKING:
    from specctl.core.extraction import ExtractJob

SERVER_OPTIONS: Final = ("endpoint", "server_command", "server_venv", "server_args", "server_timeout", "api_key_env")
FILE_ONLY: Final = ("server_timeout",)
OWN_OPTIONS: Final = ("batch_tokens", "device")
"""What only specctl's own engine makes something of."""

LENGTH_OPTIONS: Final = ("--max-model-len", "--context-length")
"""How long a text may be, in the words of vLLM and of SGLang."""


def refuse_server_options(config: EvalConfig | ExtractConfig, defaults: EvalConfig | ExtractConfig) -> None:
    """Raises UsageError for an option for servers where none will run."""
    engine = plugins.load_engine(config.engine)
    given = [n for n in SERVER_OPTIONS if getattr(config, n, None) != getattr(defaults, n, None)]
    if given and not engine.IS_SERVER:
        servers = [name for name in plugins.names("engines") if plugins.load_engine(name).IS_SERVER]
        spelled = f"`{given[0]} =`" if given[0] in FILE_ONLY else f"`--{given[0].replace('_', '-')}`"
        raise UsageError(
            f"{spelled} is for servers, and `--engine {config.engine}` is {engine.TITLE}",
            hint=f"name one of {', '.join(servers)} with `--engine`",
        )


def note_draft(plan: DecodePlan, reporter: Reporter) -> None:
    """Says what DRAFT is at an endpoint, and warns of one that plainly drafts another number of tokens."""
    config = plan.config
    if config.endpoint is None or config.draft is None:
        return
    reporter.note("the server's draft cannot be seen: DRAFT is taken as its name")
    own = said_tokens(look_at(CheckConfig(config.draft, plan.spec.path, config.engine)))
    if own is not None and own != plan.num_draft_tokens and config.num_draft_tokens is None:
        reporter.warn(
            f"the server drafts {plan.num_draft_tokens} tokens and DRAFT says {own}: is it the draft that the server "
            f"runs? `--num-draft-tokens {plan.num_draft_tokens}` says that the number is meant"
        )


def refuse_long(prompts: Sequence[Prompt], plan: DecodePlan) -> None:
    """Raises UsageError for prompts that do not fit the length given in `--server-args`, before a server starts."""
    found = too_long(prompts, plan, _given_room(plan.config))
    if found is not None:
        raise UsageError(found, where="`--server-args`", hint=SHORTER)


def _given_room(config: EvalConfig) -> int | None:
    """The longest text by `--server-args`, the last one said; None where no plain number is."""
    words = [part for word in shlex.split(config.server_args or "") for part in word.split("=", 1)]
    said = [after for word, after in pairwise(words) if word.replace("_", "-") in LENGTH_OPTIONS]
    return int(said[-1]) if said and said[-1].isdecimal() else None


def ready(config: ExtractConfig, spec: TargetSpec, slots: tuple[str, ...], reporter: Reporter) -> dict[str, Any]:
    """The settings that another engine adds to a folder. Raises SpecctlError for what it cannot do.

    States of other software differ in their last bits, so a folder holds those of one engine.
    """
    engine = plugins.load_states_engine(config.engine)
    defaults = ExtractConfig("", ("",), "")
    given = [name for name in OWN_OPTIONS if getattr(config, name) != getattr(defaults, name)]
    if given:
        raise UsageError(
            f"`--{given[0].replace('_', '-')}` has no meaning with `--engine {config.engine}`",
            hint="`--server-args` sets up the server",
        )
    versions = engine.ready_states(_plan(config, spec, slots, config.max_length), reporter)
    return {"engine": {config.engine: dict(versions)}}


def run_served(job: ExtractJob, config: ExtractConfig, reporter: Reporter) -> None:
    """Make the shards of `job` from what the engine hands out."""
    from specctl.core.samples import open_spool
    from specctl.core.served import make_shards

    engine = plugins.load_states_engine(config.engine)
    lengths = open_spool(job.spool).lengths
    longest = max(int(lengths[sample]) for shard in job.shards for sample in shard.samples)
    with engine.open_states(_plan(config, job.spec, job.slots, longest), reporter) as states:
        make_shards(job, states, reporter)


def _plan(config: ExtractConfig, spec: TargetSpec, slots: tuple[str, ...], longest: int) -> StatesPlan:
    from specctl.core.served import boundaries

    dtype = spec.compute_dtype if config.dtype == "auto" else config.dtype
    return StatesPlan(config, spec, boundaries(slots, spec.num_layers), dtype, longest)
