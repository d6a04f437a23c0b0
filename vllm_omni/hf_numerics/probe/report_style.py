# SPDX-License-Identifier: Apache-2.0
"""The style sheet of the HTML report; its variables also colour the plots."""

__all__ = ["CSS"]

# Contrast of text on its ground is at least 4.5 in both schemes.
CSS = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1f2328; --dim: #59636e; --line: #d1d9e0; --band: #f6f8fa;
  --good: #1a7f37; --bad: #c42b36; --warn: #8a5d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #3d444d; --band: #161b22;
    --good: #3fb950; --bad: #ff7b72; --warn: #d9a73f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 20px; margin: 0 0 12px; }
h2 { font-size: 16px; margin: 32px 0 8px; border-bottom: 1px solid var(--line); padding-bottom: 4px; }
.verdict { font-size: 17px; margin: 0 0 12px; padding: 12px 16px; background: var(--band); border-left: 6px solid; }
.verdict strong { margin-right: 8px; }
.verdict.good, .finding.good { border-color: var(--good); }
.verdict.bad, .finding.bad { border-color: var(--bad); }
.verdict.warn { border-color: var(--warn); }
.verdict.good strong { color: var(--good); }
.verdict.bad strong { color: var(--bad); }
.verdict.warn strong { color: var(--warn); }
.finding { margin: 8px 0; padding: 6px 12px; border-left: 4px solid; }
.obstacles li { overflow-wrap: anywhere; }
.notes { color: var(--warn); }
.dim, footer, figcaption { color: var(--dim); }
figure { margin: 0; }
figcaption { font-size: 13px; }
.plot { display: block; width: 100%; min-width: 640px; height: auto; font-family: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
.sides td, .records td:nth-child(n+3) { overflow-wrap: anywhere; }
.records td { min-width: 24px; }
.numbers th, .numbers td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.numbers th:first-child, .numbers td:first-child { text-align: left; }
.sides { table-layout: fixed; }
.sides th:first-child { width: 24px; }
.sides td { font-family: ui-monospace, monospace; font-size: 12px; }
tr.differs td { color: var(--bad); }
.sides tr.differs td { font-weight: 600; background: var(--band); }
tr.dim td { color: var(--dim); }
summary { cursor: pointer; margin: 8px 0; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 10px; vertical-align: -1px; }
.key.equal { background: var(--good); opacity: 0.35; margin-left: 0; }
.key.differing { background: var(--bad); }
.key.first { border: 2px solid var(--ink); }
footer { margin-top: 40px; font-size: 13px; }
@media print { .scroll { overflow: visible; } .plot { min-width: 0; } }
"""
