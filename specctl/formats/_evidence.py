"""Which layout a checkpoint is in: what specctl wrote about it, or else its features. Never raises."""

from collections.abc import Mapping
from typing import Any

from specctl.files.checkpoint import Checkpoint
from specctl.formats._settings import marker


def marked(checkpoint: Checkpoint, layout: str) -> int | None:
    """100 or 0 where specctl wrote the checkpoint; None where it did not."""
    written = marker(checkpoint.config).get("layout")
    return None if not isinstance(written, str) else 100 * (written == layout)


def is_ours(checkpoint: Checkpoint) -> bool:
    """specctl wrote it, so that config.json says what the head was trained with."""
    return bool(marker(checkpoint.config))


def architecture(checkpoint: Checkpoint) -> str:
    """The class that config.json names; empty where it names none."""
    listed = checkpoint.config.get("architectures")
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], str) else ""


def block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object; empty where it is missing or no object."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def has_names(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether a tensor's name begins so."""
    return any(name.startswith(prefix) for name in checkpoint.tensors)
