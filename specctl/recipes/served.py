"""What recipes share about engines that are servers: whose options they are, and states that one hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specctl import plugins
from specctl.errors import UsageError
from specctl.records.evaluation import EvalConfig
from specctl.records.extraction import ExtractConfig, StatesPlan
from specctl.records.progress import Reporter
from specctl.records.target import TargetSpec

if TYPE_CHECKING:
    from specctl.core.extraction import ExtractJob

SERVER_OPTIONS: Final = ("endpoint", "server_command", "server_venv", "server_args", "server_timeout", "api_key_env")
FILE_ONLY: Final = ("server_timeout",)
OWN_OPTIONS: Final = ("batch_tokens", "device")
"""What only specctl's own engine makes something of."""


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
