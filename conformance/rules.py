"""The broken fixtures of the error rules, given to vLLM's own loader."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures.broken as broken
from conformance.claims import CRASHES, REFUSED, why_not
from conformance.rows import Row
from specctl.recipes.check import rules

HEALTHY = ("PLAIN", "HEALTHY EAGLE-3", "HEALTHY P-EAGLE")
LOADER = Path(__file__).with_name("loader.py")
PARALLEL_WITHOUT_A_FLAG = ("NORMS_SPECULATORS_PEAGLE",)
"""P-EAGLE heads in a layout that says it elsewhere."""


def make_cases(folder: Path) -> list[dict[str, Any]]:
    """A target that vLLM's CPU kernels can run, and a draft for each rule that is given to it."""
    import torch
    import transformers

    broken.widen(hidden=64, head_dim=32, inner=96)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": broken.LAYERS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": broken.TARGET_VOCAB}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "target")
    cases: list[dict[str, Any]] = [{"name": HEALTHY[0], "draft": None, "parallel": False}]
    drafts = {HEALTHY[1]: broken.draft(), HEALTHY[2]: broken.draft(parallel=True)}
    drafts |= {name: copy.deepcopy(make()) for name, make in _given().items()}
    for name, draft in drafts.items():
        path = folder / name.replace(" ", "-") / "draft"
        broken.save(draft, path)
        is_parallel = draft.config.get("parallel_drafting") is True or name in PARALLEL_WITHOUT_A_FLAG
        cases.append({"name": name, "draft": str(path), "parallel": is_parallel})
    return cases


def _given() -> dict[str, Callable[[], broken.Draft]]:
    found = {}
    for rule in rules():
        if rule.level == "error":
            made = broken.BROKEN[rule.id]()
            if why_not(rule.id, made.options, has_own_target=made.target is not None) is None:
                found[rule.id] = broken.BROKEN[rule.id]
    return found


def judge_rules(python: Path, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """A row for each rule: whether vLLM does with its draft what the rule claims."""
    cases = make_cases(folder)
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [str(python), str(LOADER), str(folder / "target"), str(folder / "cases.json")]
    rows, plain = [], None
    with (
        (folder / "loader.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if found["name"] == HEALTHY[0]:
                plain = found.get("tokens")
            rows.append(_row(found, plain, folder))
            say(f"{len(rows)}/{len(cases)} {found['name']}")
    if len(rows) < len(cases):
        rows.append(Row("the loader", f"{len(cases)} results", f"{len(rows)}; see {folder}/loader.log", False))
    return rows


def _row(found: dict[str, Any], plain: list[int] | None, folder: Path) -> Row:
    name = found["name"]
    claims = "refused" if name in REFUSED else "served"
    if "error" in found:
        error = found["error"].replace(str(folder), "FOLDER")
        # A loader that refuses says why; a process that only ends, or never does, is no refusal.
        is_said = name in CRASHES or not error.startswith(("nothing within", "the process ended"))
        return Row(f"`{name}`", claims, f"refused: {error[:160]}", name in REFUSED and is_said)
    is_same = plain is not None and found["tokens"] == plain
    text = "the target's text" if is_same else "ANOTHER TEXT"
    kept = f"{found['accepted']} of {found['drafts']} drafts kept a token" if found["drafts"] else "no draft"
    return Row(f"`{name}`", claims, f"served: {text}, {kept}", name not in REFUSED and is_same)
