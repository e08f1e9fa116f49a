"""A checkpoint folder: its config, its tensors, and what is wrong with the files. Knows no layout, no runtime.

What a user can mend in the files is collected as problems, all at once; only a path that is no checkpoint
at all is an error. More than 300 lines, because which files count and which a server would take instead are
one decision. Source: transformers `modeling_utils.py`; vLLM 0.33.0 `default_loader.py:144-262`.
"""

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias

from specctl.errors import InputError, UnsafeFile
from specctl.files.inside import ClosedFile, inside, is_inside
from specctl.files.jsonfile import read_json
from specctl.files.regular import kind_of, shown
from specctl.files.safetensors import read_header
from specctl.files.shardindex import ShardIndex, read_index
from specctl.files.tensors import TensorEntry
from specctl.files.torchzip import read_torch, wrapping_key

Container: TypeAlias = Literal["safetensors", "sharded", "bin", "sharded-bin", "none"]

CONFIG: Final = "config.json"
MAX_LIKE_PROBLEMS: Final = 20
"""Problems of one rule that are listed; a broken index has one per tensor, a hostile one millions."""

HARMLESS: Final = ("WEIGHTS_STRAY", "WEIGHTS_WRAPPED", "WEIGHTS_CONSOLIDATED", "INDEX_SUBFOLDER", "CONFIG_KEY_TWICE")
"""Problems that leave no doubt about what is meant; with any other one nothing may be made of the files."""

_PRECEDENCE: Final[tuple[tuple[str, str, Container, Container], ...]] = (
    (".safetensors", "model.safetensors", "safetensors", "sharded"),
    (".bin", "pytorch_model.bin", "bin", "sharded-bin"),
)
_PICKLES: Final = (".bin", ".pt", ".pth")
_NO_WEIGHTS: Final = ("training_args.bin", "optimizer.bin")
"""What vLLM leaves out of the *.bin files of a folder; it loads every other one (its list has *.pt files too)."""
_ADAPTER: Final = "adapter_"
_CONSOLIDATED: Final = "consolidated"
_MAX_DEPTH: Final = 4
_MAX_ENTRIES: Final = 5000
"""How far below the folder `consolidated*.safetensors` is looked for."""
_RESUME: Final = "training_state.pt"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with the files themselves; `rule` is the id of the rule that it breaks."""

    rule: str
    where: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What lies in a folder. `has_config` is false, and `config` empty, when config.json is missing or broken."""

    folder: Path
    config: Mapping[str, Any]
    has_config: bool
    tensors: Mapping[str, TensorEntry]
    container: Container
    weight_files: tuple[Path, ...]
    side_files: tuple[str, ...]
    """Names of the other plain files, sorted."""
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Weights:
    container: Container
    files: tuple[Path, ...] = ()
    tensors: Mapping[str, TensorEntry] | None = None
    index: str = ""


def open_checkpoint(path: Path, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
    """The checkpoint in a folder, or of one weights file with the config.json beside it.

    Reads headers, not weights. Where an index says which file holds what, only the files of `wanted` tensors
    are opened; all of them by default. Raises InputError when the path does not exist, is neither a folder nor a
    weights file, cannot be listed, or holds neither config.json nor weights.
    """
    folder = _folder(path)
    names = _names(folder)
    problems: list[Problem] = []
    config, has_config = _config(folder, names, problems)
    weights = _read_weights(folder, names, problems, wanted) if folder == path else _named(path, problems)
    if weights.container == "none":
        if CONFIG not in names:
            _refuse_other_folder(folder, names)
        problems.append(_no_weights(folder, names))
    used = {CONFIG, weights.index, *(file.name for file in weights.files if file.parent == folder)}
    sides = tuple(shown(name) for name in names if name not in used and is_inside(folder, name))
    files = tuple(file for file in weights.files if file == path or is_inside(folder, str(file.relative_to(folder))))
    return Checkpoint(
        folder, config, has_config, weights.tensors or {}, weights.container, files, sides, _capped(problems)
    )


def _folder(path: Path) -> Path:
    """The folder: `path` itself, or that of a weights file."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"expected a checkpoint folder: {reason}", where=shown(str(path))) from None
    if stat.S_ISDIR(mode):
        return path
    if stat.S_ISREG(mode) and path.suffix in (".safetensors", *_PICKLES):
        return path.parent
    found = f"a `{shown(path.suffix)}` file" if stat.S_ISREG(mode) else kind_of(mode)
    raise InputError(
        f"expected a checkpoint folder or a `.safetensors` or `.bin` file and found {found}",
        where=shown(str(path)),
        hint="name the folder that holds config.json",
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"the folder cannot be listed: {error.strerror}", where=shown(str(folder))) from None


def _config(folder: Path, names: list[str], problems: list[Problem]) -> tuple[Mapping[str, Any], bool]:
    if CONFIG not in names:
        problems.append(Problem("CONFIG_MISSING", CONFIG, "config.json beside the weights", "nothing"))
        return {}, False
    try:
        config, twice = read_json(inside(folder, CONFIG))
    except ClosedFile as closed:
        problems.append(_closed(CONFIG, closed, "CONFIG_BROKEN"))
        return {}, False
    except InputError as error:
        problems.append(Problem("CONFIG_BROKEN", CONFIG, "one JSON object in UTF-8", error.message))
        return {}, False
    problems += [Problem("CONFIG_KEY_TWICE", CONFIG, f"`{name}` once", "twice; the last counts") for name in twice]
    return config, True


def _closed(name: str, closed: ClosedFile, rule: str) -> Problem:
    if closed.is_outside:
        return Problem("LINK_OUTSIDE", shown(name), "a file in the folder", closed.found)
    return Problem(rule, shown(name), "a plain file", closed.found)


def _read_weights(
    folder: Path, names: list[str], problems: list[Problem], wanted: Callable[[str], bool] | None
) -> _Weights:
    for suffix, single, container, sharded in _PRECEDENCE:
        found = [name for name in names if _is_loaded(name, suffix)]
        index = f"{single}.index.json"
        if index in names:
            weights = _sharded(folder, index, sharded, problems, wanted)
        elif chosen := [single] if single in found and suffix == ".safetensors" else _chosen(found):
            weights = _plain(folder, chosen, container, problems)
        else:
            continue
        used = {os.path.normpath(file.relative_to(folder)) for file in weights.files}
        others = [name for name in found if name not in used]
        if suffix == ".safetensors":
            problems += _strays(others, weights.index or min(used))
        elif wanted is None:
            weights = _with_other_pickles(folder, others, weights, problems)
        problems += _consolidated(folder, names, used)
        return weights
    return _Weights("none")


def _is_loaded(name: str, suffix: str) -> bool:
    """Whether vLLM would load a file of the folder's root, if it takes this suffix at all."""
    return name.endswith(suffix) and not name.startswith(".") and name not in _NO_WEIGHTS


def _chosen(found: list[str]) -> list[str]:
    """The weights among files without an index: an adapter is none, and what Mistral's format holds comes last."""
    heads = [name for name in found if not name.startswith(_ADAPTER)]
    return [name for name in heads if not _is_consolidated(name)] or heads


def _strays(others: list[str], winner: str) -> Iterator[Problem]:
    """Only among safetensors: two kinds of container side by side are common and harmless."""
    for name in others:
        if not _is_consolidated(name):
            yield Problem("WEIGHTS_STRAY", shown(name), f"only what `{winner}` stands for", "a file that is not read")


def _with_other_pickles(folder: Path, others: list[str], weights: _Weights, problems: list[Problem]) -> _Weights:
    """The weights with those of every other *.bin of the folder: vLLM loads them all, index or not."""
    tensors = dict(weights.tensors or {})
    for name in others:
        for tensor, entry in (_file_tensors(folder, name, problems) or {}).items():
            _add(tensors, tensor, entry, problems)
    return replace(weights, files=(*weights.files, *(folder / name for name in others)), tensors=tensors)


def _is_consolidated(name: str) -> bool:
    return name.startswith(_CONSOLIDATED) and name.endswith(".safetensors")


def _consolidated(folder: Path, names: list[str], used: set[str]) -> Iterator[Problem]:
    """A file that switches vLLM to Mistral's format, in which it takes the root's `consolidated*.safetensors` only."""
    root = [name for name in names if _is_consolidated(name)]
    expected = "no file of this name, here or below"
    if root and set(root) != used:
        found = f"a file that vLLM loads in place of `{shown(min(used))}`" if used else "a file that vLLM loads alone"
        yield Problem("WEIGHTS_CONSOLIDATED", shown(root[0]), expected, found)
    elif not root and (below := _first_consolidated(folder)) is not None:
        found = "a file that makes vLLM look for weights of this name beside config.json, and for no others"
        yield Problem("WEIGHTS_CONSOLIDATED", shown(below), expected, found)


def _first_consolidated(folder: Path) -> str | None:
    """The first such file below the folder by level and name. Follows no link, and gives up in a large tree."""
    level, seen = deque([(Path(), 0)]), 0
    while level and seen < _MAX_ENTRIES:
        below, depth = level.popleft()
        try:
            with os.scandir(folder / below) as entries:
                inner = sorted(islice(entries, _MAX_ENTRIES - seen), key=lambda entry: entry.name)
        except OSError:
            continue
        seen += len(inner)
        for entry in inner:
            if entry.is_dir(follow_symlinks=False):
                level += [(below / entry.name, depth + 1)] if depth < _MAX_DEPTH else []
            elif _is_consolidated(entry.name):
                return str(below / entry.name)
    return None


def _plain(folder: Path, names: Iterable[str], container: Container, problems: list[Problem]) -> _Weights:
    """Files that are all read, without an index."""
    tensors: dict[str, TensorEntry] = {}
    files = []
    for name in names:
        files.append(folder / name)
        for tensor, entry in (_file_tensors(folder, name, problems) or {}).items():
            _add(tensors, tensor, entry, problems)
    return _Weights(container, tuple(files), tensors)


def _named(path: Path, problems: list[Problem]) -> _Weights:
    """One file that the user named, wherever a link leads."""
    tensors = _file_tensors(path.parent, path.name, problems, is_named=True)
    return _Weights("safetensors" if path.suffix == ".safetensors" else "bin", (path,), tensors)


def _add(tensors: dict[str, TensorEntry], name: str, entry: TensorEntry, problems: list[Problem]) -> None:
    old = tensors.setdefault(name, entry)
    if old is not entry:
        found = f"in `{shown(old.path.name)}` and `{shown(entry.path.name)}`"
        problems.append(Problem("TENSOR_TWICE", shown(name), "in one file", found))


def _file_tensors(
    folder: Path, name: str, problems: list[Problem], *, is_named: bool = False
) -> Mapping[str, TensorEntry] | None:
    """The tensors of one file; None, and a problem more, when it cannot be read."""
    is_safetensors = name.endswith(".safetensors")
    try:
        path = folder / name if is_named else inside(folder, name)
        if not is_safetensors and (key := wrapping_key(path)) is not None:
            problems.append(Problem("WEIGHTS_WRAPPED", shown(name), "tensors by name", f"a dict under `{key}`"))
        return read_header(path)[0] if is_safetensors else read_torch(path)
    except ClosedFile as closed:
        problems.append(_closed(name, closed, "WEIGHTS_BROKEN"))
    except UnsafeFile as error:
        problems.append(Problem("WEIGHTS_UNSAFE", shown(name), "tensors only", error.message))
    except InputError as error:
        expected = "a whole safetensors file" if is_safetensors else "a whole zip of `torch.save`"
        problems.append(Problem("WEIGHTS_BROKEN", shown(name), expected, error.message))
    return None


def _sharded(
    folder: Path,
    name: str,
    container: Container,
    problems: list[Problem],
    wanted: Callable[[str], bool] | None,
) -> _Weights:
    try:
        index = read_index(inside(folder, name))
    except ClosedFile as closed:
        problems.append(_closed(name, closed, "INDEX_BROKEN"))
        return _Weights(container, index=name)
    except InputError as error:
        problems.append(Problem("INDEX_BROKEN", name, "a `weight_map` of tensors to files", error.message))
        return _Weights(container, index=name)
    problems += [Problem("INDEX_BROKEN", name, "one shard for each tensor", what) for what in index.faults]
    problems += [
        Problem("INDEX_PATH_ESCAPES", name, "the name of a file in the folder", f"`{shown(shard)}`")
        for shard in index.escaping
    ]
    tensors: dict[str, TensorEntry] = {}
    files = []
    for shard in index.shards:
        if not os.path.lexists(folder / shard):
            problems.append(Problem("INDEX_SHARD_MISSING", shown(shard), f"the file, which `{name}` names", "nothing"))
            continue
        if "/" in shard:
            found = f"a file in the folder `{shown(str(Path(shard).parent))}`, where vLLM does not look"
            problems.append(Problem("INDEX_SUBFOLDER", shown(shard), "a file beside config.json", found))
        files.append(folder / shard)
        is_wanted = wanted is None or any(map(wanted, index.promised(shard)))
        held = _file_tensors(folder, shard, problems) if is_wanted else None
        if held is not None:
            _add_shard(tensors, index, shard, held, problems)
    return _Weights(container, tuple(files), tensors, name)


def _add_shard(
    tensors: dict[str, TensorEntry],
    index: ShardIndex,
    shard: str,
    held: Mapping[str, TensorEntry],
    problems: list[Problem],
) -> None:
    """Take a shard's tensors, also those that the index does not name: vLLM loads them."""
    for name, entry in held.items():
        _add(tensors, name, entry, problems)
        if index.shard_of.get(name) == shard:
            tensors[name] = entry
    for name in sorted(index.promised(shard) - held.keys()):
        problems.append(Problem("INDEX_TENSOR_MISSING", shown(name), f"in `{shown(shard)}`", "not there"))


def _no_weights(folder: Path, names: list[str]) -> Problem:
    others = [name for name in names if name.startswith("adapter_model.") or name in (_RESUME, "eagle_meta.pt")]
    found = ", ".join(f"`{name}`" for name in others) or "nothing of the kind"
    return Problem("WEIGHTS_MISSING", shown(str(folder)), "`model.safetensors` or an index of shards", found)


def _refuse_other_folder(folder: Path, names: list[str]) -> NoReturn:
    """Raises InputError for a folder without config and weights, with the next step where one is known."""
    hint = "name the folder that holds config.json and the weights"
    below = next((sub for sub in ("model", "model/consolidated") if is_inside(folder, f"{sub}/{CONFIG}")), None)
    if below:
        hint = f"the checkpoint lies one step down: give `{shown(str(folder / below))}`"
    elif _RESUME in names:
        hint = f"`{_RESUME}` is a trainer's resume state; export the draft from the trainer first"
    elif "adapter_model.safetensors" in names or "adapter_model.bin" in names:
        hint = "the folder holds a LoRA adapter; merge it into its base model first"
    raise InputError("the folder holds neither config.json nor weights", where=shown(str(folder)), hint=hint)


def _capped(problems: list[Problem]) -> tuple[Problem, ...]:
    counts: dict[str, int] = {}
    kept = []
    for problem in problems:
        counts[problem.rule] = counts.get(problem.rule, 0) + 1
        if counts[problem.rule] <= MAX_LIKE_PROBLEMS:
            kept.append(problem)
    for rule, count in counts.items():
        if count > MAX_LIKE_PROBLEMS:
            last = next(problem for problem in reversed(kept) if problem.rule == rule)
            kept.append(replace(last, where="...", found=f"{count - MAX_LIKE_PROBLEMS} more like these"))
    return tuple(kept)
