# SPDX-License-Identifier: Apache-2.0
"""Draw the picture of docs/index.md from docs/results/parity-h200.json: ``python docs/scripts/draw_index.py``.

Plain SVG text, so that the file is small, has the same bytes everywhere, and a test can draw it again. Standard
library only.
"""

import json
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1]
SOURCE = DOCS / "results" / "parity-h200.json"
TARGET = DOCS / "assets" / "distance.svg"
LAYERS, EXECUTION = 48, "graphs"

WIDTH, HEIGHT = 760, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 48, 64
OFF, ON = "#c2553a", "#2f6db3"


def counts(layers: int = LAYERS, execution: str = EXECUTION) -> dict[str, list[int]]:
    """By mode, "off" and "on": log-probs at ULP distance 0, then in [2**n, 2**(n + 1)) for n = 0 ... 23."""
    runs = json.loads(SOURCE.read_text(encoding="utf-8"))["runs"]
    [run] = [r for r in runs if r["spec"]["preset"]["layers"] == layers and r["spec"]["execution"] == execution]
    found = {}
    for row in run["rows"]:
        # The older runs know one comparison alone and do not name it.
        against = row.get("against") or row["trainer"]
        if row["layout"] == "alone" and (row["mode"], against) in (("off", "plain"), ("on", "aligned")):
            buckets = [row["ulp_histogram"].get(str(n), 0) for n in range(24)]
            found[row["mode"]] = [row["compared"] - row["differing"], *buckets]
    return found


def _text(x: float, y: float, content: str, *, anchor: str = "middle", size: int = 12, fill: str = "#555") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(content)}</text>'


def svg() -> str:
    """The picture: bars of both modes over the ULP distance, on a scale of counts."""
    bars = counts()
    total = sum(bars["on"])
    slot = (WIDTH - LEFT - RIGHT) / len(bars["on"])
    scale = (HEIGHT - TOP - BOTTOM) / total
    floor = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" role="img">',
        "<title>Distance between the rollout's log-probs and the trainer's, mode off and on</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
    ]
    for count in range(0, total + 1, total // 4):
        y = floor - count * scale
        parts.append(f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{count:,}", anchor="end"))
    for mode, colour in (("off", OFF), ("on", ON)):
        for index, count in enumerate(bars[mode]):
            if count:
                x, height = LEFT + slot * (index + 0.1), count * scale
                parts.append(
                    f'<rect x="{x:.1f}" y="{floor - height:.1f}" width="{slot * 0.8:.1f}" height="{height:.1f}" '
                    f'fill="{colour}"/>'
                )
    for index in range(len(bars["on"])):
        label = "0" if index == 0 else f"2^{index - 1}"
        if index == 0 or index % 4 == 1:
            parts.append(_text(LEFT + slot * (index + 0.5), floor + 18, label))
    parts.append(
        _text(WIDTH / 2, HEIGHT - 14, "distance of the trainer's log-prob from the rollout's, in float32 steps (ULP)")
    )
    for place, (mode, colour) in enumerate((("on", ON), ("off", OFF))):
        differing = total - bars[mode][0]
        x = LEFT + place * 340
        parts.append(f'<rect x="{x}" y="18" width="12" height="12" fill="{colour}"/>')
        label = f"mode {mode}: {differing:,} of {total:,} log-probs differ"
        parts.append(_text(x + 18, 29, label, anchor="start", size=14, fill="#222"))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    TARGET.write_text(svg(), encoding="utf-8")
    print(TARGET)
