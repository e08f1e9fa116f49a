"""The page of an evaluation: needs nothing else, tells tokens apart, obeys no text, and is whole or not there."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT

from specctl.core.tables import baselines
from specctl.errors import MachineError, UsageError
from specctl.files.jsonfile import to_json
from specctl.recipes.charts import Range, histogram, position_bars, ranges
from specctl.recipes.judge import judge
from specctl.recipes.report import page, write_report
from specctl.recipes.reportstyle import STYLE
from specctl.recipes.transcript import chosen, marks, transcript
from specctl.records.evaluation import EvalResult, PromptResult, SizeResult, Step, count_steps

WORDS = ["the", " tide", " comes", "\n", " <script>alert(1)</script>", " &amp;", " \x1b[31m", " \u202e", " in", " out"]


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i % len(WORDS)] for i in ids)


def prompt(name: str, steps: Sequence[Step], *, tokens: Sequence[int] | None = None, **changes) -> PromptResult:
    text = list(range(1 + sum(kept + 1 for _, kept in steps))) if tokens is None else list(tokens)
    c = count_steps(steps, num_tokens=len(text))
    made = PromptResult(name, None, 0, (0, 1), tuple(text), c.num_drafts, c.proposed, c.accepted, tuple(steps), "eos")
    return replace(made, **changes)


def results(shift: int = 0) -> tuple[PromptResult, ...]:
    return tuple(
        prompt(
            f"q{i}",
            [((3, 4, 5), (i + shift) % 4), ((6, 7, 8), 1), ((), 0)],
            category=["<i>writing</i>", "math"][i % 2],
            tokens=range(shift, shift + 5),
            gaps=(1.0,) * 5,
        )
        for i in range(16)
    )


def run(*sizes: SizeResult, **settings) -> EvalResult:
    named = {"target": "a/<target>", "draft": "d&f", "prompts": "p", "num_draft_tokens": 3, "dtype": "bfloat16"}
    return EvalResult({**named, **settings}, {"specctl": "0.1.0"}, sizes)


def two_sizes() -> EvalResult:
    first, second = results(), results(1)
    made = run(SizeResult(1, 1, first, 2.0, 3.0), SizeResult(2, 1, second, 2.5, 3.0, None, 640))
    return replace(made, baselines=baselines(first, 3))


def whole_page(result: EvalResult | None = None) -> str:
    result = result or two_sizes()
    return page(result, judge(result, tolerance=0.05), decode=decode)


class Balance(HTMLParser):
    """The tags that are open, each attribute that was seen, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Balance:
    found = Balance()
    found.feed(text)
    found.close()
    assert not found.open
    return found


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    found = parsed(whole_page())
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object", "a", "form", "base"}
    assert not {name for _, attrs in found.tags for name in attrs if name in ("src", "href") or name.startswith("on")}
    assert "url(" not in STYLE and "@import" not in STYLE
    policy = dict(next(attrs for tag, attrs in found.tags if "http-equiv" in attrs))["content"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_text_that_was_measured_is_shown_and_not_obeyed() -> None:
    text = whole_page()
    assert "<script" not in text and "<i>" not in text and "<target>" not in text
    assert "\x1b" not in text and "\u202e" not in text
    words = "".join(parsed(text).text)
    for shown in ("<script>alert(1)</script>", "&amp;", "\\x1b[31m", "\\u202e", "a/<target>", "d&f", "<i>writing</i>"):
        assert shown in words


def test_the_page_says_number_interval_verdict_and_settings() -> None:
    result = two_sizes()
    judgement = judge(result, tolerance=0.05)
    words = "".join(parsed(whole_page(result)).text)
    row = judgement.rows[0]
    assert f"{row.length.value:.2f}95 % interval {row.length.low:.2f} to {row.length.high:.2f}" in words
    assert judgement.sentence[1:] in words
    for title in (
        "Acceptance by position, PP 1",
        "Over prompts, PP 1",
        "Sizes, with 95 % intervals",
        "Paired differences",
        "By category, PP 1",
        "Without a draft",
        "Texts that differ",
        "Transcripts",
        "Settings",
        "Versions",
    ):
        assert title in words
    assert "rounding" in words


def test_a_page_of_one_size_without_drafts_is_whole() -> None:
    plain = prompt("a", [((), 0)], tokens=(1, 2))
    for result in (run(SizeResult(1, 1, (plain,), 0.0), no_spec=True), run(SizeResult(1, 1, (), 0.0), draft=None)):
        text = page(result, judge(result, tolerance=0.05))
        assert "Transcripts" not in "".join(parsed(text).text)
        assert "nan" not in text.lower().replace("nance", "")


def test_styles_follow_light_and_dark_with_enough_contrast() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[0], STYLE.split("dark)")[1]
    for part in (light, dark):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part))
        pairs = [("ink", ground) for ground in ("back", "card", "accepted", "corrected", "bonus", "band")]
        pairs += [("soft", "card"), ("soft", "back"), ("refused", "card"), ("soft", "band")]
        for ink, ground in pairs:
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def contrast(first: str, second: str) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


# Transcripts.


def kinds(result: PromptResult) -> list[list[tuple[int, str]]]:
    return [[(m.token, m.kind) for m in step] for step in marks(result)]


def test_each_token_of_a_transcript_is_what_it_was() -> None:
    result = prompt("a", [((1, 2, 50), 2), ((4, 5), 2), ((), 0), ((60, 61), 0)], tokens=range(9))
    assert kinds(result) == [
        [(0, "plain")],
        [(1, "accepted"), (2, "accepted"), (50, "refused"), (3, "corrected")],
        [(4, "accepted"), (5, "accepted"), (6, "bonus")],
        [(7, "plain")],
        [(60, "refused"), (61, "refused"), (8, "corrected")],
    ]


def test_a_text_cut_within_a_draft_ends_there() -> None:
    result = prompt("a", [((1, 2, 3, 50), 3), ((6,), 1)], tokens=range(3))
    assert kinds(result) == [[(0, "plain")], [(1, "accepted"), (2, "accepted")]]
    assert kinds(prompt("b", [], tokens=())) == [[]]


def test_kept_and_own_tokens_of_a_transcript_are_the_text() -> None:
    rng = random.Random(0)
    for length in (1, 2, 5, 9, 30):
        steps: list[Step] = []
        at = 1
        while at < length:
            drafted = [at + i for i in range(rng.randint(0, 4))]
            kept = rng.randint(0, len(drafted))
            steps.append((tuple(drafted[:kept] + [99] * (len(drafted) - kept)), kept))
            at += kept + 1
        result = prompt("a", steps, tokens=range(length))
        assert [m.token for step in marks(result) for m in step if m.kind != "refused"] == list(result.tokens)


def test_kinds_differ_without_colour() -> None:
    rules = {
        name: re.search(rf"^\.{name} {{(.*)}}", STYLE, re.M) for name in ("accepted", "corrected", "bonus", "refused")
    }
    said = {name: re.sub(r"(#|var\()[^;]*", "", rule[1]) for name, rule in rules.items() if rule}
    assert "double" in said["corrected"] and "dotted" in said["bonus"] and "line-through" in said["refused"]
    assert len(set(said.values())) == 4


def test_pieces_are_those_that_the_tokens_add_to_their_text() -> None:
    def spaced(ids: Sequence[int]) -> str:
        # As sentencepiece does: the space before the first word is dropped.
        return "".join(f" w{i}" for i in ids).lstrip(" ")

    text = transcript(prompt("a", [((1, 50), 1)], tokens=(0, 1, 2)), spaced)
    assert re.findall(r">([^<>]*w\d+)</span>", text) == [" w0", " w1", " w50", " w2"]


def test_a_token_that_is_no_whole_character_is_shown_by_its_id() -> None:
    halves = {7: b"\xc3", 8: b"\xa9"}

    def by_bytes(ids: Sequence[int]) -> str:
        return b"".join(halves.get(i, b"a") for i in ids).decode(errors="replace")

    text = transcript(prompt("a", [((7, 8), 2)], tokens=(0, 7, 8, 1)), by_bytes)
    assert re.findall(r'at \d">([^<]*)</span>', text) == ["a", "[7]", "\u00e9", "a"]
    assert "[8]" in transcript(prompt("a", [((7, 8), 2)], tokens=(0, 7, 8, 1)), None)


def test_the_lowest_middle_and_highest_texts_are_shown() -> None:
    texts = [prompt(name, [((1, 2, 3), kept)]) for name, kept in (("a", 2), ("b", 0), ("c", 3), ("d", 1), ("e", 1))]
    assert [(why, r.id) for why, r in chosen(texts)] == [
        ("lowest, 1.00", "b"),
        ("middle, 2.00", "e"),
        ("highest, 4.00", "c"),
    ]
    assert [r.id for _, r in chosen(texts[:1])] == ["a"]
    assert chosen([]) == []


# Charts.


def test_a_position_that_was_never_proposed_is_said_to_be() -> None:
    words = "".join(parsed(position_bars((0.5, None), (0.5, None))).text)
    assert "50.0 % / 50.0 %" in words and "never proposed" in words


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [1.0, 1.1, 5.0], [1.3 + i / 37 for i in range(80)]])
def test_a_histogram_counts_every_prompt_once(values: list[float]) -> None:
    text = histogram(values, mark=sum(values) / len(values))
    bars = re.findall(r"</?text[^>]*text-anchor=\"middle\">(\d+)</text>", text.split('class="axis"')[0])
    counts = [int(n) for n in re.findall(r"<rect[^>]*/><text[^>]*>(\d+)</text>", text)]
    assert sum(counts) == len(values) and bars
    for x, width in re.findall(r'<rect class="bar" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text):
        assert float(x) >= 10 and float(x) + float(width) <= 330.5


def test_ranges_are_drawn_within_the_picture() -> None:
    rows = [Range("PP 1", 2.0, 1.5, 2.75), Range("a very long category name indeed", 1.0), Range("none", None)]
    text = ranges(rows, show=lambda x: f"{x:.2f}", band=(-1.0, 1.0))
    for x in re.findall(r'(?:cx|x1|x2)="([-\d.]+)"', text):
        assert 0 <= float(x) <= 340
    assert "2.00 (1.50 to 2.75)" in text and ">none</text>" in text and "a very long category ..." in text
    assert ranges([Range("none", None)], show=str) == ""


# Writing.


def test_a_report_replaces_the_one_before_also_through_a_link(tmp_path: Path) -> None:
    result = two_sizes()
    judgement = judge(result, tolerance=0.05)
    link, real = tmp_path / "link.html", tmp_path / "deep" / "real.html"
    link.symlink_to(real)
    write_report(link, result, judgement)
    write_report(link, result, judgement, decode=decode)
    assert link.is_symlink()
    assert real.read_text() == page(result, judgement, decode=decode)
    assert [p.name for p in real.parent.iterdir()] == ["real.html"]


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    result = two_sizes()
    judgement = judge(result, tolerance=0.05)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(UsageError, match="expected a file for the report"):
            write_report(path, result, judgement)
    with pytest.raises(MachineError, match="cannot write"):
        write_report(Path("/proc/none/report.html"), result, judgement)


WRITER = """
import json, sys
from pathlib import Path
from specctl.recipes.judge import judge
from specctl.recipes.report import write_report
from specctl.records.evaluationfile import result_from_dict

result = result_from_dict(json.loads(Path(sys.argv[1]).read_text()), "result")
judgement = judge(result, tolerance=0.05)
print("ready", "torch" in sys.modules, flush=True)
while True:
    write_report(Path(sys.argv[2]), result, judgement)
"""


def test_a_killed_run_leaves_a_whole_page_or_none(tmp_path: Path) -> None:
    source, path = tmp_path / "result.json", tmp_path / "report.html"
    source.write_text(to_json(two_sizes().to_dict()))
    for pause in (0.0, 0.011, 0.05):
        command = [sys.executable, "-c", WRITER, source, path]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == "ready False\n"
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert not path.exists() or path.read_text().endswith("</html>\n")


def test_a_page_of_a_server_says_what_it_was_not_told() -> None:
    """Counts without steps, and no DRAFT: neither plain decoding nor a text in which nothing was drafted."""
    results = [replace(r, steps=None) for r in two_sizes().sizes[0].results]
    result = two_sizes()
    result = replace(result, sizes=(replace(result.sizes[0], results=tuple(results)),))
    settings = {**result.settings, "draft": None, "no_spec": False, "server": "http://h:8000"}
    text = whole_page(replace(result, settings=settings))
    assert "the draft of http://h:8000" in text and "plain decoding" not in text.split("</h1>")[0]
    assert 'class="token untold"' in text and 'class="token plain" title' not in text
