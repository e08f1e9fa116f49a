"""An evaluation as one HTML page that needs nothing else: no script, no font, no request to anywhere."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from specctl.errors import UsageError
from specctl.files.regular import shown
from specctl.recipes import charts
from specctl.recipes.charts import Range
from specctl.recipes.reportstyle import STYLE
from specctl.recipes.transcript import Decode, chosen, legend, transcript, visible
from specctl.recipes.verdict import percent
from specctl.records.evaluation import EvalResult
from specctl.records.judgement import Difference, Divergence, Estimate, Judgement, SizeRow

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""The page asks for nothing; this makes a browser hold it to that, whatever text was measured."""


def write_report(path: Path, result: EvalResult, judgement: Judgement, *, decode: Decode | None = None) -> None:
    """Write the page to `path`: whole or not at all, over a page that was there.

    `decode` gives the text of token ids; without it the transcript shows ids. Raises UsageError when `path`
    is something that is no plain file, MachineError when it cannot be written.
    """
    from specctl.core.folder import cannot_write, write_atomic

    # Through links: they may name a file elsewhere, and replacing the link would not change that one.
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise UsageError("expected a file for the report and found something else", where=shown(str(path)))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, page(result, judgement, decode=decode).encode())
    except OSError as error:
        raise cannot_write(place.parent, error) from error


def page(result: EvalResult, judgement: Judgement, *, decode: Decode | None = None) -> str:
    """The page's text."""
    parts = [
        _headline(result.settings, judgement),
        _sizes(judgement),
        f'<div class="cards">{"".join(_charts(judgement))}</div>',
        _baselines(judgement),
        _divergences(judgement.divergences, decode),
        _transcripts(result, decode),
        _words("Settings", result.settings),
        _words("Versions", result.versions),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Acceptance length of {_escaped(_draft(result.settings))}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _headline(settings: Mapping[str, Any], judgement: Judgement) -> str:
    row = judgement.rows[0]
    interval = "no interval" if row.length.low is None else f"95 % interval {_interval(row.length)}"
    verdict = ""
    if judgement.outcome is not None:
        verdict = f'<p class="verdict {judgement.outcome}">{_escaped(_sentence(judgement.sentence))}</p>'
    notes = "".join(f"<p>{_escaped(_sentence(note))}</p>" for note in judgement.notes)
    return (
        f"<header><h1>Acceptance length of {_escaped(_draft(settings))}</h1>"
        f'<p class="soft">on {_escaped(settings.get("target"))}, prompts {_escaped(settings.get("prompts"))}</p>'
        f'<p><span class="number">{_number(row.length.value)}</span>{interval}; {row.name}, {row.prompts} prompts, '
        f"{row.drafts:,} drafts</p>"
        '<p class="soft">Tokens of a step that verified a draft, the target&#x27;s own token included: '
        f"1 + accepted / drafts, over all prompts together.</p>{verdict}{notes}</header>"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _draft(settings: Mapping[str, Any]) -> str:
    if settings.get("draft") or settings.get("no_spec"):
        return str(settings.get("draft") or "plain decoding")
    return f"the draft of {settings.get('server') or 'a server'}"


def _sizes(judgement: Judgement) -> str:
    rows = judgement.rows
    lines: list[tuple[str, Callable[[SizeRow], str]]] = [
        ("acceptance length", lambda r: _number(r.length.value)),
        ("its 95 % interval", lambda r: _interval(r.length)),
        ("difference", lambda r: _relative(r.difference)),
        ("its 95 % interval", lambda r: _relative_interval(r.difference)),
        ("mean over texts (macro)", lambda r: _number(r.macro_mean)),
        ("tokens per step, cut at a stop", lambda r: _number(r.tokens_per_step)),
        ("prompts", lambda r: f"{r.prompts:,}"),
        ("steps of the target", lambda r: f"{r.steps:,}"),
        ("drafts", lambda r: f"{r.drafts:,}"),
        ("new tokens", lambda r: f"{r.tokens:,}"),
        ("tokens/s", lambda r: _number(r.tokens_per_second, 1)),
        ("speed-up over plain decoding", lambda r: _number(r.speed_up)),
        ("bytes between stages by token", lambda r: _number(r.bytes_per_token, 0)),
    ]
    for i in range(max((len(r.joint_rates) for r in rows), default=0)):
        lines.append((f"kept at position {i + 1}, joint / conditional", partial(_rates, i)))
    body = [[name, *(cell(r) for r in rows)] for name, cell in lines]
    return _section("Sizes", _table(["", *(r.name for r in rows)], [line for line in body if any(line[1:])]))


def _charts(judgement: Judgement) -> Iterable[str]:
    first = judgement.rows[0]
    if first.joint_rates:
        text = "Filled: kept, of all drafts. Outlined: kept, of the drafts kept so far."
        bars = charts.position_bars(first.joint_rates, first.conditional_rates)
        yield _section(f"Acceptance by position, {first.name}", bars, text)
    if first.lengths:
        text = "Prompts by their acceptance length; the dashed line is that of all together."
        yield _section(f"Over prompts, {first.name}", charts.histogram(first.lengths, mark=first.length.value), text)
    lengths = [_range(r.name, r.length) for r in judgement.rows]
    yield _section("Sizes, with 95 % intervals", charts.ranges(lengths, show=_number))
    yield from _difference_chart(judgement)
    for row in judgement.rows[:1]:
        categories = [_range(c.name, c.length) for c in row.categories]
        if categories:
            yield _section(f"By category, {row.name}", charts.ranges(categories, show=_number))


def _difference_chart(judgement: Judgement) -> Iterable[str]:
    found = [(r.name, r.against, r.difference) for r in judgement.rows if r.difference is not None]
    rows = [
        Range(f"{name} less {against}", d.relative, d.relative_low, d.relative_high)
        for name, against, d in found
        if d.relative is not None
    ]
    if rows:
        tolerance = judgement.tolerance
        drawn = charts.ranges(rows, show=lambda x: percent(x, signed=True), band=(-tolerance, tolerance))
        yield _section("Paired differences", drawn, f"Shaded: the tolerance of {percent(tolerance)}.")


def _baselines(judgement: Judgement) -> str:
    if not judgement.baselines:
        return ""
    mine = judgement.rows[0]
    rows = [["the draft", _number(mine.tokens_per_step), _number(mine.length.value), _interval(mine.length), ""]]
    for row in judgement.baselines:
        share = "" if row.drafted_share is None else percent(row.drafted_share)
        rows.append([row.name, _number(row.tokens_per_step), _number(row.length.value), _interval(row.length), share])
    head = ["", "tokens per step", "acceptance length", "95 % interval", "steps with a draft"]
    text = "On the same texts. Compare tokens per step: the others draft only where they find something."
    return _section("Without a draft", _table(head, rows), text)


def _divergences(found: Sequence[Divergence], decode: Decode | None) -> str:
    if not found:
        return ""
    rows = [
        [
            d.id if not d.turn else f"{d.id}, turn {d.turn + 1}",
            d.size,
            str(d.index + 1),
            f"{_token(d.token, decode)} / {_token(d.other_token, decode)}",
            f"{_number(d.gap, 4)} / {_number(d.other_gap, 4)}",
            {None: "", True: "rounding can explain it", False: "too far for rounding"}[d.is_near],
        ]
        for d in found
    ]
    head = ["prompt", "size", "token", "there / compared", "gap of the two best logits", ""]
    text = "Where a greedy text leaves that of the size it is compared with."
    return _section("Texts that differ", _table(head, rows), text)


def _token(token: int | None, decode: Decode | None) -> str:
    if token is None:
        return "ended"
    return str(token) if decode is None else f"{token} {decode([token])!r}"


def _transcripts(result: EvalResult, decode: Decode | None) -> str:
    picked = chosen(result.sizes[0].results)
    if not picked:
        return ""
    texts = [
        f"<h3>{_escaped(r.id)} <span class='soft'>{_escaped(why)}</span></h3>{transcript(r, decode)}"
        for why, r in picked
    ]
    return _section("Transcripts", legend() + "".join(texts), "By acceptance length. A thin line ends a step.")


def _words(title: str, values: Mapping[str, Any]) -> str:
    body = "".join(f"<tr><td>{_escaped(k)}</td><td>{_escaped(v)}</td></tr>" for k, v in values.items())
    return _section(title, f'<table class="words">{body}</table>')


def _section(title: str, inner: str, text: str = "") -> str:
    lead = f'<p class="soft">{_escaped(text)}</p>' if text else ""
    return f"<section><h2>{_escaped(title)}</h2>{lead}{inner}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{_escaped(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _escaped(value: object) -> str:
    return visible(str(value))


def _range(name: str, estimate: Estimate) -> Range:
    return Range(name, estimate.value, estimate.low, estimate.high)


def _number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:,.{places}f}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{_number(estimate.low)} to {_number(estimate.high)}"


def _relative(found: Difference | None) -> str:
    return "" if found is None or found.relative is None else percent(found.relative, signed=True)


def _relative_interval(found: Difference | None) -> str:
    if found is None or found.relative_low is None or found.relative_high is None:
        return ""
    return f"{percent(found.relative_low, signed=True)} to {percent(found.relative_high, signed=True)}"


def _rates(index: int, row: SizeRow) -> str:
    both = [rates[index] if index < len(rates) else None for rates in (row.joint_rates, row.conditional_rates)]
    return "" if both[0] is None else " / ".join("none" if r is None else f"{100 * r:.1f} %" for r in both)
