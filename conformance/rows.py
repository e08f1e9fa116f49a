"""A row of the table: what was expected of vLLM and of specctl, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`what` was done, what should come of it, and what did."""

    what: str
    expected: str
    seen: str
    holds: bool


def table(title: str, rows: list[Row]) -> str:
    """Rows as Markdown."""
    lines = ["| what | expected | seen | holds |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.what, row.expected, row.seen, "yes" if row.holds else "**no**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return f"## {title}\n\n" + "\n".join(lines) + "\n"
