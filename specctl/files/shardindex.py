"""The index of a sharded checkpoint: which shard holds which tensor. Opens no shard.

Source: transformers `utils/hub.py` (`get_checkpoint_shard_files`).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final

from specctl.errors import InputError
from specctl.files.jsonfile import read_json
from specctl.files.regular import shown

MAX_SHARDS: Final = 10_000


@dataclass(frozen=True)
class ShardIndex:
    """A readable `weight_map`, sorted into what can be used and what cannot."""

    shard_of: dict[str, str]
    """Tensor name to the shard's name, for shards that lie in the folder."""
    escaping: tuple[str, ...]
    """Names of shards that leave the folder, sorted."""
    faults: tuple[str, ...]

    @cached_property
    def _names(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, shard in self.shard_of.items():
            found.setdefault(shard, set()).add(name)
        return found

    @property
    def shards(self) -> list[str]:
        """The shards to open, each once, sorted."""
        return sorted(self._names)

    def promised(self, shard: str) -> set[str]:
        """The tensors that the index says the shard holds."""
        return self._names[shard]


def read_index(path: Path) -> ShardIndex:
    """The index at `path`. Raises InputError when it is no JSON, has no `weight_map`, or names too many shards."""
    data, twice = read_json(path)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("`weight_map` is missing, empty or no object", where=shown(str(path)))
    faults = [f"`{name}` stands in it twice" for name in twice]
    faults += [f"`{shown(name)}` has no file name" for name, shard in weight_map.items() if not _is_name(shard)]
    usable = {name: shard for name, shard in weight_map.items() if _is_name(shard)}
    escaping = {shard for shard in usable.values() if _leaves(shard)}
    # One spelling for one file: `./a` is `a`.
    shard_of = {n: str(PurePosixPath(shard)) for n, shard in usable.items() if shard not in escaping}
    if len(set(shard_of.values())) > MAX_SHARDS:
        raise InputError(f"`weight_map` names more than {MAX_SHARDS} shards", where=shown(str(path)))
    return ShardIndex(shard_of, tuple(sorted(escaping)), tuple(faults))


def _is_name(shard: Any) -> bool:
    return isinstance(shard, str) and "\0" not in shard and PurePosixPath(shard).name != ""


def _leaves(shard: str) -> bool:
    """Absolute, up, or by a separator of another system, which there would leave the folder."""
    return shard.startswith("/") or "\\" in shard or ".." in PurePosixPath(shard).parts
