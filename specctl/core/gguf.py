"""Turns a GGUF file into a plain transformers folder, once. Knows nothing of extraction.

transformers dequantises GGUF on load but refuses to save or split what it loaded so; a plain copy in
the cache folder loads ten times faster and runs on any number of stages.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from specctl.core.ggufrope import put_rope
from specctl.core.quiet import quiet_transformers
from specctl.errors import MachineError, TargetError

MAGIC = b"GGUF"
MIN_BYTES = 64
PROBE_TOKENS = 8
PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf\Z")
MADE_BY: Final = "v2"
"""Part of a copy's name. Copies without it were made before rope scaling was read from the file."""


def check_header(path: Path) -> None:
    """Raises TargetError when `path` is no complete GGUF file, before a library reads it."""
    with path.open("rb") as file:
        head = file.read(MIN_BYTES)
    if head[:4] != MAGIC:
        raise TargetError(f"`{path.name}` starts with {head[:4]!r}, a GGUF file with {MAGIC!r}", where=str(path))
    if len(head) < MIN_BYTES:
        raise TargetError(
            f"`{path.name}` ends after {len(head)} bytes, within its header", where=str(path), hint="fetch it again"
        )


def refuse_part(path: Path) -> None:
    """Raises TargetError when the name of `path` says that it is one file of several."""
    part = PART.search(path.name)
    if part is not None and int(part[2]) > 1:
        first = path.name.replace(part[0], f"-00001-of-{part[2]}.gguf")
        raise TargetError(
            f"`{path.name}` is part {int(part[1])} of a GGUF file split in {int(part[2])}, which specctl reads whole",
            where=str(path),
            hint=f"merge the parts with llama.cpp: `llama-gguf-split --merge {first} {path.name[: part.start()]}.gguf`",
        )


def dequantize(gguf: Path, cache: Path, fingerprint: str) -> Path:
    """The transformers folder made from `gguf`, from the cache when it was made before.

    Raises TargetError when the file is damaged, split, of an architecture transformers cannot read, scales rope
    in a way that transformers cannot express, or gives a model whose logits are uniform or not finite;
    MachineError when the cache cannot be written.
    """
    refuse_part(gguf)
    folder = cache / f"{fingerprint.replace(':', '-')}-{MADE_BY}"
    if (folder / "config.json").is_file():
        return folder
    check_header(gguf)
    from safetensors import SafetensorError

    temporary = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=cache))
        _convert(gguf, temporary)
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        if (folder / "config.json").is_file():  # another process was first
            return folder
        raise _not_written(cache, error) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _not_written(cache: Path, error: Exception) -> MachineError:
    return MachineError(
        f"cannot write the dequantised target: {getattr(error, 'strerror', None) or error}",
        where=str(cache),
        hint="its float32 weights take 4 bytes a parameter: make room, or set HF_HOME to a folder on another disk",
    )


def _convert(gguf: Path, out: Path) -> None:
    """Write the transformers folder of `gguf` into `out`. Raises TargetError, OSError, SafetensorError."""
    config, loaded, tokenizer = _read(gguf)
    config.quantization_config = None
    for key in ("quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(key, None)
    from transformers import AutoModelForCausalLM, GenerationConfig

    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.eval()
    _refuse_dead(plain, gguf)
    # Kept in float32, which holds every dequantised value exactly.
    if tokenizer.eos_token_id is None:
        raise TargetError("the tokenizer in this GGUF file has no end-of-sequence token", where=str(gguf))
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _read(gguf: Path) -> tuple[Any, Any, Any]:
    """The configuration with the file's rope, the model as transformers loads it, and the tokenizer."""
    try:
        import gguf as _reader  # noqa: F401
    except ImportError:
        raise TargetError(
            "reading GGUF needs the `gguf` package", where=str(gguf), hint="pip install 'specctl[gguf]'"
        ) from None
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        put_rope(config, gguf)
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            loaded, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except TargetError:
        raise
    except Exception as error:  # the reader raises bare exceptions of many kinds on damaged files
        raise TargetError(
            f"transformers cannot read this GGUF file: {type(error).__name__}: {error}",
            where=str(gguf),
            hint="is it complete, and of an architecture that transformers reads from GGUF?",
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"`{missing[0]}` was not found in this GGUF file, and would be filled with random values",
            where=str(gguf),
            hint="this version of transformers does not map every tensor of it; use the original weights",
        )
    return config, loaded, tokenizer


def _refuse_dead(model: torch.nn.Module, gguf: Path) -> None:
    """A tensor that the reader renamed or dropped shows as uniform or non-finite logits."""
    vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    ids = torch.arange(1, PROBE_TOKENS + 1).remainder(vocab_size)[None]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0].float()
    if not bool(torch.isfinite(logits).all()) or float(logits.std(dim=-1).min()) < 1e-4:
        raise TargetError(
            "this GGUF file loads into a model whose logits are uniform or not finite; a tensor was lost",
            where=str(gguf),
            hint="this version of transformers does not map the file's architecture; use the original weights",
        )
