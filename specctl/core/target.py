"""A target model: what its files say, its tokenizer, and its weights on a device.

Knows folders, hub ids and GGUF files; does not know what is captured or how ranks are started.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specctl.core import gguf
from specctl.core.decoder import Decoder, find_decoder
from specctl.core.device import DTYPES
from specctl.core.quiet import quiet_transformers
from specctl.core.weightcheck import quantization_of, refuse_differing, refuse_packed, stored_dtype
from specctl.errors import MachineError, NotSupportedError, SpecctlError, TargetError
from specctl.records.target import TargetSpec, text_settings

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
SMALL_PATTERNS = ["*.json", "*.model", "*.jinja", "*.txt", "tokenizer*", "*.py"]
HUB_PATTERNS = ["*.safetensors", *SMALL_PATTERNS]
_LOADER_ERRORS = (OSError, ValueError, ImportError, LookupError, RuntimeError, TypeError, AttributeError)
BLOCK_BYTES = 4096
BLOCKS_PER_FILE = 256


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target on a device: the whole LM (or this rank's part of it) and its decoder."""

    spec: TargetSpec
    model: nn.Module
    decoder: Decoder
    device: torch.device
    dtype: torch.dtype


def describe_target(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, is_whole: bool = True
) -> TargetSpec:
    """What `name` (folder, hub id, GGUF file or folder with one) is, without loading weights.

    A GGUF file is dequantised into the cache on first use. Unless `is_whole` the weights may be missing, are
    not fetched from the hub, and the fingerprint of missing ones is empty. Raises TargetError.
    """
    quiet_transformers()
    folder, gguf_file = resolve(name, revision, is_whole=is_whole)
    has_weights = is_whole or gguf_file is not None or any(any(folder.glob(g)) for g in WEIGHT_PATTERNS[:2])
    fingerprint = weights_fingerprint(folder, gguf_file) if has_weights else ""
    if gguf_file is not None:
        from huggingface_hub.constants import HF_HOME

        folder = gguf.dequantize(folder / gguf_file, Path(HF_HOME) / "specctl" / "gguf", fingerprint)
    raw = _read_config(folder)
    config = _auto_config(folder, trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise NotSupportedError(
            f"`{config.model_type}` is an encoder-decoder; specctl reads decoder-only language models",
            where=str(folder),
        )
    prefix, text = text_settings(raw)
    text_config = config.get_text_config()
    weights = sum(p.stat().st_size for pattern in WEIGHT_PATTERNS for p in folder.glob(pattern))
    return TargetSpec(
        name=name,
        path=str(folder),
        revision=revision,
        gguf_file=gguf_file,
        architecture=(raw.get("architectures") or ["unknown"])[0],
        model_type=str(raw.get("model_type", "unknown")),
        text_prefix=prefix,
        num_layers=_size(text, text_config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        hidden_size=_size(text, text_config, "hidden_size", "n_embd", "d_model", "dim"),
        vocab_size=_size(text, text_config, "vocab_size"),
        # Dequantised weights are kept in float32; nobody computes a 4-bit model in that unasked.
        compute_dtype="bfloat16" if gguf_file else _compute_dtype(raw, text, folder),
        quantization="gguf" if gguf_file else quantization_of(folder, (raw, text)),
        is_tied=_is_tied(raw, text, text_config),
        config_hash=hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest(),
        weights_fingerprint=fingerprint,
        weights_bytes=weights,
    )


def load_tokenizer(spec: TargetSpec, *, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer. Raises TargetError when the folder has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(spec.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise TargetError(
            f"the target has no tokenizer that transformers can load: {_first_line(error)}", where=spec.path
        ) from error


def empty_model(spec: TargetSpec, *, trust_remote_code: bool = False) -> nn.Module:
    """The target's modules without storage, to learn its structure before weights load."""
    quiet_transformers()
    config = _auto_config(Path(spec.path), trust_remote_code)
    try:
        with torch.device("meta"):
            model: nn.Module = _auto_class(config, trust_remote_code).from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError, OSError, AttributeError, RuntimeError, TypeError) as error:
        raise TargetError(f"cannot build `{spec.architecture}`: {_first_line(error)}", where=spec.path) from error
    return model


def load_target(
    spec: TargetSpec,
    *,
    dtype: str,
    device: torch.device,
    distributed_config: Any = None,
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """The target's weights in `dtype` on `device`, or this rank's part under `distributed_config`.

    Raises TargetError where checkpoint and model do not have the same tensors, NotSupportedError for numbers
    that transformers would misread (`weightcheck`).
    """
    quiet_transformers()
    config = _auto_config(Path(spec.path), trust_remote_code)
    from safetensors import SafetensorError

    refuse_packed(spec)
    # Without the error that transformers has for other shapes, which names no tensor.
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "ignore_mismatched_sizes": True}
    options["trust_remote_code"] = trust_remote_code
    if distributed_config is not None:
        options["distributed_config"] = distributed_config
    elif device.type != "cpu":
        options["device_map"] = {"": device}
    try:
        model, info = _auto_class(config, trust_remote_code).from_pretrained(
            spec.path, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError as error:
        raise MachineError(f"the target does not fit on {device}", where=spec.path, hint="use `--pp`") from error
    except (
        OSError,
        ValueError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        if isinstance(error, SpecctlError):
            raise
        raise TargetError(f"cannot load the target's weights: {_first_line(error)}", where=spec.path) from error
    decoder = find_decoder(model, spec.num_layers)
    refuse_differing(info, model, spec, path=decoder.path, is_part=distributed_config is not None)
    model.eval()
    model.requires_grad_(False)
    for config in (model.config, model.config.get_text_config()):
        config.return_dict = True  # a config.json may ask for tuples
    return LoadedTarget(spec, model, decoder, device, DTYPES[dtype])


def resolve(name: str, revision: str | None = None, *, is_whole: bool = True) -> tuple[Path, str | None]:
    """The local folder of `name`, and the GGUF file in it when that is what it holds."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            return path, None
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return path, files[0].name
        if files:
            gguf.refuse_part(files[0])
            raise TargetError(
                f"the folder holds {len(files)} GGUF files", where=str(path), hint=f"name one, as in {files[0]}"
            )
        raise TargetError("the folder has neither `config.json` nor a GGUF file", where=str(path))
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1 or path.exists():
        raise TargetError(
            f"`{name}` is neither a folder nor a hub id", hint="a hub id has the form owner/name; is the path right?"
        )
    return _fetch(name, revision, HUB_PATTERNS if is_whole else SMALL_PATTERNS), None


def weights_fingerprint(folder: Path, gguf_file: str | None = None) -> str:
    """A hash of each weight file's name, size and 256 blocks spread over it.

    Tells fine-tunes of one model apart in milliseconds; it is no proof against malice.
    """
    files = [folder / gguf_file] if gguf_file else sorted(p for g in WEIGHT_PATTERNS[:2] for p in folder.glob(g))
    if not files:
        raise TargetError("the folder holds no `*.safetensors` or `pytorch_model*.bin`", where=str(folder))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name if not gguf_file else ''}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(BLOCKS_PER_FILE):
                file.seek(size * i // BLOCKS_PER_FILE)
                digest.update(file.read(BLOCK_BYTES))
    return f"blocks-sha256:{digest.hexdigest()[:32]}"


def _fetch(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's errors share no base class narrower than this
        raise TargetError(
            f"`{name}` is no local folder and could not be fetched from the hub: {_first_line(error)}",
            hint="is the name right, and is the hub within reach? A private model needs HF_TOKEN",
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no JSON object")
        return raw
    except (OSError, ValueError) as error:
        raise TargetError(f"`config.json` cannot be read: {error}", where=str(folder)) from error


def _auto_config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "code from the model's folder runs only with `--trust-remote-code`" if "remote" in str(error) else None
        raise TargetError(
            f"transformers cannot read `config.json`: {_first_line(error)}", where=str(folder), hint=hint
        ) from error


def _auto_class(config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForCausalLM._model_mapping
    has_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if known or has_code or type(config) not in AutoModelForImageTextToText._model_mapping:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def _is_tied(raw: Mapping[str, Any], text: Mapping[str, Any], config: Any) -> bool:
    key = "tie_word_embeddings"
    return bool(text.get(key, raw.get(key, getattr(config, key, False))))


def _size(raw: Mapping[str, Any], config: Any, *keys: str) -> int:
    """What is written comes first: a property may count otherwise, as LongCat's counts each layer twice."""
    for value in (*(raw.get(key) for key in keys), *(getattr(config, key, None) for key in keys)):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise TargetError(f"`config.json` states no `{keys[0]}`")


def _compute_dtype(raw: Mapping[str, Any], text: Mapping[str, Any], folder: Path) -> str:
    """The dtype of activations: the configured float, never a storage dtype like int8 or float8; else the weights'."""
    for config in (text, raw):
        for key in ("dtype", "torch_dtype"):
            value = str(config.get(key) or "").removeprefix("torch.")
            if value in DTYPES:
                return value
    if raw.get("quantization_config"):
        return "bfloat16"
    return stored_dtype(folder) or "float32"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
