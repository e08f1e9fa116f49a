"""The lists of layer ids in config.json, and how they are shown."""

from typing import Final

from specctl.files.subject import Subject

IDS: Final = "eagle_aux_hidden_state_layer_ids"


def top_ids(subject: Subject) -> list[int] | None:
    """Boundaries at the top of config.json."""
    ids = subject.settings.get(IDS)
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def nested_ids(subject: Subject) -> list[int] | None:
    """Ids in `eagle_config`, as outputs of layers."""
    eagle = subject.raw.get("eagle_config")
    ids = eagle.get(IDS) if isinstance(eagle, dict) and not subject.is_speculators else None
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def where_ids(subject: Subject) -> str:
    """Where the ids stand that count."""
    return f"config.json: {IDS}" if top_ids(subject) is not None else f"config.json: eagle_config.{IDS}"


def ids_text(ids: tuple[int, ...] | list[int] | None) -> str:
    """`[2, 15, 27]`, the first dozen."""
    shown = [str(i) for i in (ids or ())[:12]]
    return f"[{', '.join(shown)}{', ...' if len(ids or ()) > len(shown) else ''}]"


def fc_fits(subject: Subject, count: int) -> bool:
    """Whether fc has columns for `count` states."""
    head, fc = subject.head, subject.tensors.get("fc.weight")
    return head is not None and fc is not None and fc.shape == (head.hidden_size, count * head.target_hidden_size)
