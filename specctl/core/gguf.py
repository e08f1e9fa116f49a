"""Turns a GGUF file into a plain transformers folder, once. Knows nothing of extraction.

transformers dequantises GGUF on load but refuses to save or split what it loaded so; a plain copy in
the cache folder loads ten times faster and runs on any number of stages.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

import torch

from specctl.core.quiet import quiet_transformers
from specctl.errors import MachineError, TargetError

MAGIC = b"GGUF"
MIN_BYTES = 64
PROBE_TOKENS = 8


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


def dequantize(gguf: Path, cache: Path, fingerprint: str) -> Path:
    """The transformers folder made from `gguf`, from the cache when it was made before.

    Raises TargetError when the file is damaged, of an architecture transformers cannot read, or
    gives a model whose logits are uniform or not finite.
    """
    folder = cache / fingerprint.replace(":", "-")
    if (folder / "config.json").is_file():
        return folder
    check_header(gguf)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    try:
        _convert(gguf, temporary)
        temporary.replace(folder)
    except OSError as error:
        if (folder / "config.json").is_file():  # another process was first
            return folder
        raise MachineError(f"cannot write the dequantised target: {error.strerror}", where=str(cache)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(gguf: Path, out: Path) -> None:
    try:
        import gguf as _reader  # noqa: F401
    except ImportError:
        raise TargetError(
            "reading GGUF needs the `gguf` package", where=str(gguf), hint="pip install 'specctl[gguf]'"
        ) from None
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    quiet_transformers()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            config = AutoConfig.from_pretrained(**where)
            loaded, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(**where)
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
    config.quantization_config = None
    for key in ("quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(key, None)
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
