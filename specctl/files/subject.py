"""What the rules look at: a checkpoint as one runtime would read it, beside what it means to be.

The runtime's view is built leniently, so that one fault yields one finding: names are freed of wrong
prefixes, sizes that cannot be used leave `head` empty and the rules on shapes silent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.serverview import are_ids, canonical, plain_settings, sglang_boundaries, unfolded_settings
from specctl.files.tensors import ITEM_BYTES, TensorEntry, read_array
from specctl.records.contract import KeyPath
from specctl.records.head import MAX_VOCABULARY, Block, HeadConfig
from specctl.records.headkeys import SIZES, lenient_head, misfits, missing_sizes
from specctl.records.layers import aux_boundaries, is_deep_enough
from specctl.records.rope import rope_of
from specctl.records.runtimes import Runtime, Version
from specctl.records.target import TargetFacts

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCALE_ENDINGS: Final = ("_scale", "_scale_inv", ".scales", ".qweight", ".qzeros", "_packed", "_zero_point", "_absmax")
"""How names of quantized weights and their scales end."""

BUFFERS: Final = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Names that both runtimes drop by design."""

V2_SINCE: Final[Version] = (0, 25)
"""vLLM release whose V2 runner serves EAGLE-3 for plain targets; parallel drafting stays with V1."""

MAX_TABLE_BYTES: Final = 64 << 20
SGLANG_NORMS: Final[Mapping[str, str]] = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}

OWN_IDS_KEY: Final = "aux_hidden_states_layer_ids"
"""AngelSlim's own spelling of the layer ids."""

SHAPING: Final = (
    *SIZES,
    "num_key_value_heads",
    "head_dim",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "num_aux_layers",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "transformer_layer_config",
    "use_aux_hidden_state",
    "attention_bias",
    "mlp_bias",
    "fc_norm",
    "norm_before_fc",
    "architectures",
)
"""Keys without which the shapes of a head are not known."""

MASK_TOKEN_KEYS: Final = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class Subject:
    """One checkpoint under one runtime and version.

    `raw` is config.json as written, `settings` the same flat, as the runtime reads it. `tensors` are
    by canonical name. `declared_aux` are the boundary ids the layout means, None where it does not
    say. `embedding` is the target's table, where a target with weights is given.
    """

    checkpoint: Checkpoint
    layout: str
    runtime: Runtime
    version: Version
    pp: int
    target: TargetFacts | None
    embedding: TensorEntry | None
    declared_aux: tuple[int, ...] | None
    is_deep: bool

    @property
    def raw(self) -> Mapping[str, Any]:
        return self.checkpoint.config

    @cached_property
    def is_speculators(self) -> bool:
        """config.json is of the speculators kind and read so: `model_type` at the top would hide it."""
        return self.raw.get("speculators_config") is not None and self.raw.get("model_type") in (None, "speculators")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """config.json flat, with the runtime's defaults where the kind of file decides them."""
        return unfolded_settings(self.raw) if self.is_speculators else plain_settings(self.raw, self.runtime)

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Canonical name to the name in the file."""
        return {self.place_of(name): name for name in self.checkpoint.tensors}

    def place_of(self, name: str) -> str:
        """The canonical name of a tensor; SGLang has three old names for the norms before fc."""
        plain = canonical(name)
        stem, _, ending = plain.partition(".")
        old = SGLANG_NORMS.get(stem) if self.runtime == "sglang" else None
        return plain if old is None else f"{old}.{ending}"

    @cached_property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """By canonical name; buffers that every runtime drops are left out."""
        found = {self.place_of(name): entry for name, entry in self.checkpoint.tensors.items()}
        return {name: entry for name, entry in found.items() if not name.endswith(BUFFERS)}

    @property
    def is_unread(self) -> bool:
        """Some of the weights could not be read, so that what is missing tells nothing."""
        return any(problem.rule.startswith(("WEIGHTS_", "INDEX_", "LINK_")) for problem in self.checkpoint.problems)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have tensors."""
        indices = {name.split(".")[1] for name in self.tensors if name.startswith("layers.")}
        return tuple(sorted(int(i) for i in indices if i.isdecimal() and len(i) < 6))

    @cached_property
    def is_parallel(self) -> bool:
        """The head is a P-EAGLE one, by its config, its class or its tensors."""
        return (
            self.raw.get("parallel_drafting") is True
            or "mask_hidden" in self.tensors
            or (self.is_speculators and self.raw.get("speculators_model_type") == "peagle")
            or "peagle" in " ".join(self.classes).lower()
        )

    @cached_property
    def misfits(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        return tuple(misfits(self.raw))

    def has_fitting(self, key: str) -> bool:
        """Whether top-level `key` of config.json is there and of its type."""
        return self.raw.get(key) is not None and all(path != (key,) for path, _ in self.misfits)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """`architectures`, empty where it is missing or of another type."""
        return tuple(self.raw["architectures"]) if self.has_fitting("architectures") else ()

    @cached_property
    def block(self) -> Block:
        layer = self.raw.get("transformer_layer_config")
        nested = layer.get("model_type") if self.is_speculators and isinstance(layer, Mapping) else None
        is_qwen3 = nested == "qwen3" or any(name.removeprefix("Eagle3").startswith("Qwen3For") for name in self.classes)
        return "qwen3" if is_qwen3 else "llama"

    @cached_property
    def head(self) -> HeadConfig | None:
        """The head that the runtime would build; None where config.json does not say its sizes."""
        unfit = {path[-1] for path, _ in self.misfits}
        fitting = {key: value for key, value in self.settings.items() if key not in unfit}
        if unfit & set(SHAPING) or missing_sizes(fitting):
            return None
        settings = {**fitting, "parallel_drafting": self.is_parallel}
        if self.unsaid_draft_vocab is not None:
            settings["draft_vocab_size"] = self.unsaid_draft_vocab
        rope = rope_of(settings) or {}
        return lenient_head(settings, block=self.block, rope=rope, extra={})

    @property
    def vocab_size(self) -> int | None:
        """The target's vocabulary as config.json says it, also where other sizes are missing."""
        size = self.settings.get("vocab_size")
        return size if type(size) is int and 0 < size < MAX_VOCABULARY else None

    @cached_property
    def unsaid_draft_vocab(self) -> int | None:
        """The reduced vocabulary that head and map agree on and config.json does not say."""
        said, vocab = self.settings.get("draft_vocab_size"), self.settings.get("vocab_size")
        head, table = self.tensors.get("lm_head.weight"), self.tensors.get("d2t")
        if head is None or table is None or len(head.shape) != 2 or said not in (None, vocab):
            return None
        rows = head.shape[0]
        is_reduced = type(vocab) is int and 0 < rows < vocab
        return rows if is_reduced and table.shape == (rows,) else None

    @cached_property
    def effective_aux(self) -> tuple[int, ...] | None:
        """The boundary ids whose states the runtime hands to fc; None where that takes the target's depth."""
        return _effective_aux(self)

    @cached_property
    def own_ids_key(self) -> str | None:
        """A key with layer ids that no server reads, where there is one."""
        ids = self.raw.get(OWN_IDS_KEY)
        return OWN_IDS_KEY if are_ids(ids) else None

    @cached_property
    def default_aux(self) -> tuple[int, ...] | None:
        """What a runtime takes when it is told nothing."""
        if self.target is None or not is_deep_enough(self.target.num_layers):
            return None
        return aux_boundaries(self.target.num_layers)

    @cached_property
    def mask_token_ids(self) -> Mapping[str, Any]:
        """The reserved id under each key that says one, in vLLM's order of reading."""
        dflash = self.raw.get("dflash_config")
        found = {}
        if isinstance(dflash, Mapping) and dflash.get("mask_token_id") is not None:
            found["dflash_config.mask_token_id"] = dflash["mask_token_id"]
        keys = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
        return found | {key: self.raw[key] for key in keys if self.raw.get(key) is not None}

    @cached_property
    def d2t(self) -> NDArray[Any] | None:
        """The offsets as int64 [D]; None where there is no usable table, or one too large to be a map."""
        entry = self.tensors.get("d2t")
        is_usable = entry is not None and entry.dtype in ("I64", "I32") and len(entry.shape) == 1
        table = self._table(entry) if is_usable else None
        return table.astype("int64") if table is not None else None

    @cached_property
    def t2d(self) -> NDArray[Any] | None:
        """The mask as bool [V]; None where there is no usable table, or one too large to be a map."""
        entry = self.tensors.get("t2d")
        is_usable = entry is not None and entry.dtype in ("BOOL", "U8", "I8", "I32", "I64") and len(entry.shape) == 1
        table = self._table(entry) if is_usable else None
        return table != 0 if table is not None else None

    def table(self, name: str) -> NDArray[Any] | None:
        """A small tensor's values by canonical name; None where it is missing or large."""
        return self.values(self.names[name]) if name in self.names else None

    def values(self, name: str) -> NDArray[Any] | None:
        """A small tensor's values by its name in the file; None where it is missing or large."""
        return self._table(self.checkpoint.tensors.get(name))

    @cached_property
    def scales(self) -> tuple[str, ...]:
        """Names that only quantized weights have."""
        return tuple(sorted(name for name in self.tensors if name.endswith(SCALE_ENDINGS)))

    def path(self, key: str) -> KeyPath:
        """Where the runtime reads a setting in config.json."""
        return ("transformer_layer_config", key) if self.is_speculators else (key,)

    def key(self, key: str) -> str:
        """The same as text: `config.json: rope_theta`."""
        return "config.json: " + ".".join(self.path(key))

    def place(self, name: str) -> str:
        """Where a tensor stands, by canonical name: `model.safetensors: lm_head.weight`."""
        entry = self.tensors.get(name)
        if entry is None:
            files = self.checkpoint.weight_files
            return files[0].name if len(files) == 1 else "the weights"
        return f"{entry.path.name}: {self.names.get(name, name)}"

    def _table(self, entry: TensorEntry | None) -> NDArray[Any] | None:
        # Without the zeros: a shape such as [0, 2**62, 2**62] has no bytes, and numpy cannot hold it.
        if entry is None or math.prod(size or 1 for size in entry.shape) * ITEM_BYTES[entry.dtype] > MAX_TABLE_BYTES:
            return None
        return read_array(entry, MAX_TABLE_BYTES)


def _effective_aux(subject: Subject) -> tuple[int, ...] | None:
    top = subject.settings.get("eagle_aux_hidden_state_layer_ids")
    eagle = subject.raw.get("eagle_config")
    nested: Mapping[str, Any] = eagle if isinstance(eagle, Mapping) and not subject.is_speculators else {}
    inner: Any = nested.get("eagle_aux_hidden_state_layer_ids")
    ids: Any
    if subject.runtime == "sglang":
        ids = sglang_boundaries(inner, subject.target) if are_ids(inner) else None
    elif are_ids(top):
        ids = top
    else:
        # Runner V1 takes the nested list as it stands, from 0.22 on; V2 reads `layer_ids`, from 0.27 on.
        has_v2 = subject.version >= V2_SINCE and not subject.is_parallel
        from_v1 = inner if subject.version >= (0, 22) else None
        from_v2 = nested.get("layer_ids") if subject.version >= (0, 27) else None
        ids = from_v2 if has_v2 else from_v1
    return tuple(sorted(set(ids))) if are_ids(ids) else subject.default_aux
