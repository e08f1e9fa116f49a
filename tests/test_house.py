"""The walls of the house: who may import whom, who may print, what start-up may cost. Source: docs/design.md."""

import ast
import inspect
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from specctl import errors, plugins
from specctl.cli.app import COMMANDS

PACKAGE = ROOT / "specctl"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "cli": 7,
    "recipes": 6,
    "drafts": 6,
    "engines": 6,
    "core": 5,
    "contracts": 4,
    "formats": 4,
    "stores": 4,
    "plugins": 4,
    "files": 3,
    "records": 2,
    "errors": 1,
}
WINGS = {"cli", "recipes", "core", "contracts", "engines", "files", "formats", "records"}
"""Folders whose files may import each other; plug-ins share only what begins with an underscore."""

PLUGINS = ("stores", "formats", "contracts", "drafts", "engines")

HEAVY = ("torch", "transformers", "pyarrow", "accelerate", "safetensors", "numpy")


def imports(path: Path, *, top_level: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a file imports; at the top only, where it costs start-up, if so asked."""
    tree = ast.parse(path.read_text())
    type_checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if id(node) in type_checking:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "specctl" or (node.module.count(".") == 1 and node.module.startswith("specctl.")):
                yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
            yield node.module, node


def room(path: Path) -> str:
    """The folder or ground-floor file that a file belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def rooms_imported(path: Path) -> set[str]:
    modules = [m.split(".") for m, _ in imports(path) if m.startswith("specctl.")]
    return {parts[1] for parts in modules if parts[1] in FLOORS}


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in FLOORS], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_floors(path: Path) -> None:
    mine = room(path)
    for other in rooms_imported(path) - ({mine} if mine in WINGS else set()):
        assert FLOORS[other] < FLOORS[mine], f"{path.name} ({mine}) imports {other}"


def test_a_plug_in_imports_no_other_plug_in_of_its_folder() -> None:
    for folder in PLUGINS:
        for path in (PACKAGE / folder).glob("*.py"):
            siblings = {m.split(".")[2] for m, _ in imports(path) if m.startswith(f"specctl.{folder}.")}
            assert all(name.startswith("_") for name in siblings), (path, siblings)


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_every_layout_satisfies_its_protocol(name: str) -> None:
    layout = plugins.load_format(name)
    assert layout.TITLE
    for member in ("recognise", "aux_ids", "read", "write"):
        wanted = inspect.signature(getattr(plugins.Format, member)).parameters
        assert list(inspect.signature(getattr(layout, member)).parameters) == [p for p in wanted if p != "self"]


@pytest.mark.parametrize("name", plugins.names("engines"))
def test_every_engine_satisfies_its_protocol(name: str) -> None:
    engine = plugins.load_engine(name)
    assert engine.TITLE and isinstance(engine.IS_SERVER, bool)
    for member in ("refuse", "ready", "open"):
        wanted = inspect.signature(getattr(plugins.Engine, member)).parameters
        assert list(inspect.signature(getattr(engine, member)).parameters) == [p for p in wanted if p != "self"]


@pytest.mark.parametrize("name", plugins.names("contracts"))
def test_every_contract_is_rules_with_a_docstring(name: str) -> None:
    contract = plugins.load("contracts", name)
    assert contract.__doc__
    assert contract.RULES


def test_only_core_and_drafts_import_torch() -> None:
    guilty = {
        str(p.relative_to(PACKAGE))
        for p in FILES
        if room(p) not in ("core", "drafts")
        for module, node in imports(p)
        if module.split(".")[0] in ("torch", "accelerate") and not _is_load_only(p, node)
    }
    assert not guilty


def _is_load_only(path: Path, node: ast.AST) -> bool:
    """`import torch as _torch` without a use: only fixes when the library loads."""
    return ast.unparse(node).endswith("as _torch") and "_torch." not in path.read_text()


def names_used(path: Path) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_only_two_files_name_cuda_and_two_name_torch_distributed() -> None:
    cuda = {p.name for p in FILES if any(n.startswith("torch.cuda") for n in names_used(p))}
    assert cuda <= {"device.py", "parallel.py"}
    distributed = {p.name for p in FILES for m, _ in imports(p) if m.startswith("torch.distributed")}
    assert distributed <= {"parallel.py", "replicas.py"}


def test_only_cli_prints_or_knows_the_terminal_libraries() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert "print" not in calls, path
        if room(path) != "cli":
            assert not {"sys.stdout.write", "sys.stderr.write"} & calls, path
            assert not {m.split(".")[0] for m, _ in imports(path)} & {"typer", "rich"}, path


def test_nobody_imports_click_and_only_cli_and_parallel_read_the_environment() -> None:
    for path in FILES:
        assert not {m.split(".")[0] for m, _ in imports(path)} & {"click", "pydantic", "tqdm", "loguru"}, path
        # Engines give the environment to the servers that they start.
        if room(path) not in ("cli", "engines") and path.name != "parallel.py":
            assert not any(name.startswith(("os.environ", "os.getenv")) for name in names_used(path)), path


@pytest.mark.parametrize("folder", ["cli", "recipes", "files", "records", "drafts", "engines"])
def test_nothing_heavy_is_imported_at_the_top_of_the_outer_floors(folder: str) -> None:
    allowed = {"numpy"} if folder == "records" else set()
    if folder in ("drafts", "engines"):
        return
    for path in (PACKAGE / folder).glob("*.py"):
        found = {m.split(".")[0] for m, _ in imports(path, top_level=True)} & set(HEAVY) - allowed
        assert not found, path


def test_importing_the_program_loads_no_heavy_library() -> None:
    code = f"import sys, specctl.cli.app; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["extract", "--pp", "two"], 2), (["extrct"], 2)])
def test_help_and_usage_errors_take_at_most_half_a_second_of_cpu(arguments: list[str], code: int) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run([sys.executable, "-m", "specctl", *arguments], capture_output=True, cwd=ROOT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == code
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= 0.5


def test_files_stay_within_300_lines_or_say_why() -> None:
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > 300:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            assert "300 lines" in docstring, f"{path.relative_to(ROOT)} is long and does not say why"


def test_no_file_is_a_drawer() -> None:
    assert not {p.stem for p in FILES} & {"utils", "common", "base", "helpers", "misc"}


def test_every_error_has_an_exit_code_of_the_table_and_survives_a_process_border() -> None:
    import pickle

    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, errors.SpecctlError)]
    drawn = re.findall(r"(\w+) +(\d+)  ", errors.__doc__ or "")
    assert {name for name, _ in drawn} == {kind.__name__ for kind in kinds}
    for name, code in drawn:
        kind = getattr(errors, name)
        assert kind.exit_code == int(code)
        assert kind.__doc__
        copy = pickle.loads(pickle.dumps(kind("a", where="b", hint="c")))
        assert (type(copy), copy.message, copy.where, copy.hint) == (kind, "a", "b", "c")


@pytest.mark.parametrize("name", plugins.names("stores"))
def test_every_store_satisfies_its_protocol(name: str) -> None:
    store = plugins.load("stores", name)
    for member in ("SUFFIX", "COMPRESSIONS", "IS_RANDOM_ACCESS", "write", "open_shard"):
        assert hasattr(store, member)
    wanted = inspect.signature(plugins.Store.write).parameters
    assert list(inspect.signature(store.write).parameters) == [p for p in wanted if p != "self"]


def test_an_unknown_plug_in_is_a_usage_error_that_lists_them() -> None:
    with pytest.raises(errors.UsageError) as caught:
        plugins.load("stores", "zarr")
    assert "parquet, safetensors" in str(caught.value.hint)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme_and_has_three_examples_that_parse(command: str) -> None:
    import importlib

    assert f"specctl {command}" in (ROOT / "README.md").read_text()
    examples = importlib.import_module(f"specctl.cli.{command.replace('-', '_')}").EXAMPLES
    assert len(examples) == 3
    for example in examples:
        _parse(shlex.split(example))


def _parse(words: list[str]) -> None:
    """Raises when a command line does not parse; runs nothing."""
    import typer.main

    from specctl.cli.app import app

    root = typer.main.get_command(app)
    assert words[0] == "specctl"
    command = root.get_command(None, words[1])  # type: ignore[arg-type, attr-defined]
    assert command is not None, words
    command.make_context(words[1], [w for w in words[2:] if w != "|"], resilient_parsing=False)


def test_a_config_file_names_the_nearest_key_for_a_wrong_one(tmp_path: Path, run_cli) -> None:
    config = tmp_path / "run.toml"
    config.write_text("max-lenght = 5\n")
    process = run_cli("extract", "x", "y", "--out", tmp_path / "o", "--config", config)
    assert process.returncode == 2
    assert "did you mean `max_length`?" in process.stderr


def test_results_are_one_json_object_with_the_version(tiny, run_cli) -> None:
    process = run_cli("inspect", tiny("llama"), "--json")
    record = json.loads(process.stdout)
    assert (process.returncode, record["command"], record["ok"]) == (0, "inspect", True)
    assert record["report"]["num_layers"] == 8


@pytest.mark.parametrize("arguments", [[], *([c] for c in COMMANDS)])
def test_a_command_without_arguments_shows_its_help_and_exits_2(arguments: list[str], run_cli) -> None:
    process = run_cli(*arguments)
    assert process.returncode == 2
    assert process.stderr.startswith(f"Usage: specctl {' '.join(arguments)}".strip())
    assert "error" not in process.stderr.splitlines()[0]
    assert process.stdout == ""
