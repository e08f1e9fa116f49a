"""How the report looks, in light and dark. Every pair of text and ground has a contrast of 4.5 or more."""

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --back: #fcfcfb; --card: #ffffff; --ink: #1d2320; --soft: #5a635e; --rule: #d9ddda;
  --bar: #2f6f8f; --band: #dcebdf; --accepted: #d8eedd; --accepted-line: #1d7a3e; --corrected: #fbe3c4;
  --corrected-line: #a35400; --bonus: #dbe6fb; --bonus-line: #2a55b8; --refused: #a8232f; --good: #1d7a3e;
  --bad: #a8232f; --open: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --back: #15191a; --card: #1d2223; --ink: #e6eae7; --soft: #a3ada8;
  --rule: #3a4244; --bar: #6db3d6; --band: #24382b; --accepted: #1f4430; --accepted-line: #6fd08f; --corrected: #4d3512;
  --corrected-line: #f0ae5a; --bonus: #22365f; --bonus-line: #8fb2ff; --refused: #ff8f94; --good: #6fd08f;
  --bad: #ff8f94; --open: #f0bd5a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 20px 16px 48px; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 20px 0 4px; }
p { margin: 6px 0; } .soft, .small { color: var(--soft); } .soft { font-size: .9rem; }
.number { font-size: 3.2rem; font-weight: 650; line-height: 1.1; margin-right: 12px; }
.verdict { border-left: 5px solid var(--soft); padding: 4px 12px; margin: 12px 0; font-weight: 600; }
.verdict.within { border-color: var(--good); } .verdict.out { border-color: var(--bad); }
.verdict.undecided { border-color: var(--open); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px;
  margin: 20px 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 16px; margin: 16px 0;
  min-width: 0; } .cards section { margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; width: 100%; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 400; white-space: normal;
  min-width: 7em; } .words td { text-align: left; }
.words td { overflow-wrap: anywhere; white-space: normal; } thead th { color: var(--soft); font-weight: 600; }
td, .number { font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; max-width: 460px; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg text.small { fill: var(--soft); font-size: 11px; } .bar, .dot { fill: var(--bar); } .band { fill: var(--band); }
.outline { fill: none; stroke: var(--bar); } .whisker { stroke: var(--bar); stroke-width: 3; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.mark { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 5 3; }
@media (max-width: 500px) { th, td { padding-right: 10px; font-size: .86rem; } section { padding: 12px; } }
.prompt, .text { white-space: pre-wrap; overflow-wrap: anywhere; } .prompt { color: var(--soft); font-size: .9rem;
  border-left: 3px solid var(--rule); padding-left: 10px; } .text { line-height: 1.9; }
.step { border-right: 1px solid var(--rule); margin-right: 1px; }
.token { padding: 2px 0; border-bottom: 2px solid transparent; }
.accepted { background: var(--accepted); border-bottom-color: var(--accepted-line); }
.corrected { background: var(--corrected); border-bottom: 3px double var(--corrected-line); font-weight: 650; }
.bonus { background: var(--bonus); border-bottom: 2px dotted var(--bonus-line); font-style: italic; }
.refused { color: var(--refused); text-decoration: line-through; font-size: .8em; }
.legend { list-style: none; padding: 0; margin: 8px 0; display: flex; flex-wrap: wrap; gap: 4px 20px;
  font-size: .9rem; }
"""
