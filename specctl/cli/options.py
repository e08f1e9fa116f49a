"""Options that mean the same in every command, and how flags and a config file become one dataclass."""

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from specctl.errors import InputError, UsageError

T = TypeVar("T")

DEFAULT_KEY: Final = "OPENAI_API_KEY"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but warnings and errors.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with these settings and more (docs/settings.md); flags win over it."),
]


ServerVenv = Annotated[
    str | None, typer.Option("--server-venv", help="Virtual environment with the server to start, instead of the PATH.")
]
ServerCommand = Annotated[
    str | None,
    typer.Option("--server-command", help="How to start the server, as in 'python -m my_vllm serve'."),
]
ServerArgs = Annotated[
    str | None,
    typer.Option("--server-args", help="Arguments to add for the server, as in '--max-model-len 4096'."),
]


class Served(Protocol):
    """Settings of a command that can ask an endpoint."""

    @property
    def endpoint(self) -> str | None:
        """The endpoint's URL."""

    @property
    def api_key_env(self) -> str | None:
        """The name of the variable that holds its key."""


def api_key_of(config: Served) -> str | None:
    """The endpoint's key from the environment, if there is an endpoint. Raises UsageError for a name not set."""
    if config.endpoint is None:
        return None
    key = os.environ.get(config.api_key_env or DEFAULT_KEY)
    if key is None and config.api_key_env is not None:
        raise UsageError(f"the environment has no `{config.api_key_env}`", hint="export it, or leave the option out")
    return key.strip() if key else None


def epilog(examples: tuple[str, ...]) -> str:
    """The examples of a command, as the end of its help."""
    return "Examples:\n\n" + "\n\n".join(examples)


def build(kind: type[T], context: typer.Context, flags: Mapping[str, Any], config: Path | None) -> T:
    """The config dataclass `kind` from its defaults, the TOML file, and the flags that were given.

    `flags` holds every parameter by its field name; those left at their default do not override the
    file. Raises InputError for a file that cannot be read, UsageError for an unknown key (with the
    nearest name) or a value of the wrong type.
    """
    values = _read(config, kind) if config is not None else {}
    for name, value in flags.items():
        if is_given(context, name):
            values[name] = value
    fields = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    missing = fields - set(values)
    hints = get_type_hints(kind)
    values |= {
        name: flags[name]
        for name in missing
        if name in flags and (flags[name] is not None or NoneType in get_args(hints[name]))
    }
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(
                f"{_spelled(context, field.name)} is missing",
                hint=f"`{context.command_path} --help` shows what there is",
            )
    return kind(**values)


def _spelled(context: typer.Context, name: str) -> str:
    """How the user writes a parameter: `--out`, or TARGET."""
    for parameter in context.command.params:
        if parameter.name == name:
            return f"`{parameter.opts[0]}`" if parameter.param_type_name == "option" else name.upper()
    return f"`{name}`"


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user wrote the option, rather than its default standing in."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _read(path: Path, kind: type[Any]) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the config file: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the config file is not TOML: {error}", where=str(path)) from error
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            raise UsageError(
                f"`{key}` is no setting of this command",
                where=str(path),
                hint=f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(sorted(types))}",
            )
        values[name] = _typed(key, value, types[name], path)
    return values


def _typed(key: str, value: Any, expected: Any, path: Path) -> Any:
    options = get_args(expected) if get_origin(expected) in (UnionType, Union) else (expected,)
    for option in options:
        if get_origin(option) is tuple and isinstance(value, (list, str)):
            items = value if isinstance(value, list) else [value]
            return tuple(_typed(f"{key}[{i}]", item, get_args(option)[0], path) for i, item in enumerate(items))
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return value
    found = type(value).__name__
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    raise UsageError(f"`{key}` is a {found}; this setting takes {wanted}", where=str(path))
