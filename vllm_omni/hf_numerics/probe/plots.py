# SPDX-License-Identifier: Apache-2.0
"""Plots of a report as inline SVG. matplotlib is imported when a plot is drawn, and only here.

Colours are placeholders that `_inline` turns into the page's CSS variables, so one drawing suits a light and a dark
page. No pyplot: it keeps global state, and a backend that may want a display.
"""

import io
import math
import re
from typing import TYPE_CHECKING, Any

from vllm_omni.hf_numerics.probe.locate_result import AFTER, BEFORE, LocateResult
from vllm_omni.hf_numerics.probe.outcome import bucket_label, count
from vllm_omni.hf_numerics.probe.report_data import Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MissingMatplotlib", "heat_map", "mismatch_over_position", "ulp_histogram"]

_INK, _LINE, _BAD, _GOOD = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {_INK: "var(--ink)", _LINE: "var(--line)", _BAD: "var(--bad)", _GOOD: "var(--good)"}
# Opacities by size of a count; a handful of steps keeps the page small and the shades distinguishable.
_SHADES = (0.35, 0.5, 0.65, 0.8, 1.0)
_WIDTH = 9.0


class MissingMatplotlib(RuntimeError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "needed matplotlib for the plots; got none; pip install matplotlib, or use --format markdown or terminal"
        )


def _figure(height: float, rows: int = 1, **grid: Any) -> tuple["Figure", list["Axes"]]:
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingMatplotlib from error
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(rows, 1, squeeze=False, **grid)[:, 0].tolist()
    figure.patch.set_visible(False)
    for axis in axes:
        axis.patch.set_visible(False)
        axis.tick_params(colors=_INK, labelsize=9)
        for name, spine in axis.spines.items():
            spine.set_color(_LINE)
            spine.set_visible(name in ("left", "bottom"))
    return figure, axes


def _label(axis: "Axes", x: str, y: str) -> None:
    axis.set_xlabel(x, color=_INK, fontsize=10)
    axis.set_ylabel(y, color=_INK, fontsize=10)


def _say(axis: "Axes", text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color=_GOOD, fontsize=13, zorder=5)


def _inline(figure: "Figure", name: str, title: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page: no prolog, no links, ids of its own."""
    import matplotlib

    stream = io.StringIO()
    metadata = {key: None for key in ("Creator", "Date", "Format", "Type")}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata=metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, variable)
    # The page's font: matplotlib names its own, which the reader need not have.
    text = re.sub(r"font-family: [^;\"]*; ", "", text)
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    view = re.search(r'viewBox="([^"]*)"', text)
    assert view is not None
    head = f'<svg class="plot" role="img" aria-label="{title}" viewBox="{view[1]}">'
    return re.sub(r"^<svg[^>]*>", head, text, count=1).strip()


def _shade(number: int, largest: int) -> float:
    """Opacity on a logarithmic scale: 1 is visible, the largest is full."""
    place = math.log(number) / math.log(largest) if largest > 1 else 1.0
    return _SHADES[min(int(place * len(_SHADES)), len(_SHADES) - 1)]


def _cells(axis: "Axes", cells: dict[tuple[float, float], tuple[str, float]], width: float, height: float) -> None:
    """Draw rectangles at (x, y); one path for each (colour, opacity) keeps a page of many cells small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for (x, y), style in cells.items():
        box = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
        corners.setdefault(style, []).extend(box)
    for (colour, alpha), points in corners.items():
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(points) // 5)
        axis.add_patch(PathPatch(Path(points, codes), facecolor=colour, edgecolor="none", alpha=alpha))


def _power_ticks(axis: "Axes", top: int) -> None:
    step = max(1, -(-(top + 1) // 8))
    powers = range(0, top + 1, step)
    axis.set_yticks([power + 0.5 for power in powers], [bucket_label(power) for power in powers])


def mismatch_over_position(where: Positions) -> str:
    """Share of differing log-probs over the generated position; below it their ULP distance, where any differs."""
    total = sum(where.differing)
    title = "Mismatch over position"
    figure, axes = _figure(4.6 if total else 2.2, 2 if total else 1, sharex=True)
    from matplotlib.ticker import MaxNLocator

    axes[0].set_xlim(0, max(where.length, 1))
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].xaxis.set_major_formatter("{x:,.0f}")
    axes[0].grid(axis="y", color=_LINE, linewidth=0.5)
    axes[0].set_axisbelow(True)
    x = "generated position" + (f" (columns of {where.width:,})" if where.width > 1 else "")
    _label(axes[0], "" if total else x, "differing, %")
    if not total:
        _say(axes[0], f"nothing differs: 0 of {count(sum(where.compared), 'log-prob')}")
        axes[0].set_ylim(0, 100)
        return _inline(figure, "position", title)
    shares = [100 * d / c if c else 0.0 for d, c in zip(where.differing, where.compared, strict=True)]
    edges = [min(i * where.width, where.length) for i in range(len(shares) + 1)]
    axes[0].stairs(shares, edges, fill=True, color=_BAD, linewidth=0)
    axes[0].set_ylim(0, max(shares) * 1.05)
    largest = max(where.cells.values())
    cells: dict[tuple[float, float], tuple[str, float]] = {
        (column * where.width, power): (_BAD, _shade(number, largest))
        for (column, power), number in where.cells.items()
    }
    _cells(axes[1], cells, where.width, 1)
    top = max(power for _, power in where.cells)
    axes[1].set_ylim(0, max(top + 1, 4))
    _power_ticks(axes[1], max(top, 3))
    _label(axes[1], x, "ULP distance")
    return _inline(figure, "position", title)


def ulp_histogram(histogram: dict[int, int], compared: int) -> str:
    """Number of differing log-probs by ULP distance, in powers of two, on a logarithmic axis."""
    title = "ULP histogram"
    if not histogram:
        figure, (axis,) = _figure(2.0)
        _say(axis, f"nothing differs: 0 of {count(compared, 'log-prob')}")
        axis.set(xticks=[], yticks=[])
        _label(axis, "ULP distance", "log-probs")
        return _inline(figure, "ulp", title)
    top = max(histogram)
    figure, (axis,) = _figure(3.2)
    powers = list(range(top + 1))
    axis.bar(powers, [histogram.get(power, 0) for power in powers], width=0.85, color=_BAD, linewidth=0)
    axis.set_yscale("symlog", linthresh=1)
    ticks = [0, *(10**power for power in range(len(str(max(histogram.values()))) + 1))]
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_ylim(0, max(histogram.values()) * 2.5)
    axis.set_xlim(-0.7, max(top, 5) + 0.7)
    for power, number in histogram.items():
        place: dict[str, Any] = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "color": _INK}
        axis.annotate(f"{number:,}", (power, number), fontsize=9 if top <= 12 else 7, **place)
    rotated: dict[str, Any] = {"rotation": 40, "ha": "right"} if top > 5 else {}
    axis.set_xticks(powers, [bucket_label(power) for power in powers], **rotated)
    axis.minorticks_off()
    axis.grid(axis="y", color=_LINE, linewidth=0.5)
    axis.set_axisbelow(True)
    _label(axis, "ULP distance", "log-probs")
    return _inline(figure, "ulp", title)


def _shown_columns(columns: list[str]) -> list[int]:
    """Columns with room for a label: those outside the layers, and every nth layer that is not close to the last."""
    layers = [i for i, name in enumerate(columns) if name not in (BEFORE, AFTER)]
    step = max(1, -(-len(layers) // 24))
    end = len(columns) - (step if columns[-1] == AFTER else 0)
    return [i for i, name in enumerate(columns) if name in (BEFORE, AFTER) or (i in layers[::step] and i < end)]


def heat_map(located: LocateResult) -> str:
    """Layer x op: equal, differing (shaded by how many values), not recorded; the first divergence is framed."""
    grid = located.grid()
    ops, columns, largest = grid.ops, grid.columns, max((p.differing for p in located.points), default=0)
    figure, (axis,) = _figure(0.9 + 0.27 * max(len(ops), 2))
    cells: dict[tuple[float, float], tuple[str, float]] = {}
    for (op, column), found in grid.cells.items():
        style = (_BAD, _shade(found.differing, largest)) if found.differing else (_GOOD, 0.35)
        cells[columns.index(column) + 0.06, ops.index(op) + 0.06] = style
    _cells(axis, cells, 0.88, 0.88)
    if grid.first is not None:
        from matplotlib.patches import Rectangle

        op, column = grid.first
        corner = columns.index(column), ops.index(op)
        axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_INK, linewidth=2, clip_on=False, zorder=4))
    # Few layers would otherwise be drawn as wide bars.
    axis.set_xlim(0, max(len(columns), 24))
    axis.set_ylim(max(len(ops), 1), 0)
    shown = _shown_columns(columns)
    axis.set_xticks([i + 0.5 for i in shown], [columns[i] for i in shown])
    axis.set_yticks([i + 0.5 for i in range(len(ops))], ops)
    for text in axis.get_yticklabels():
        text.set_parse_math(False)  # a dollar sign in an op's name is no formula
    axis.tick_params(length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    _label(axis, "layer", "")
    axis.xaxis.label.set_x(len(columns) / 2 / axis.get_xlim()[1])
    return _inline(figure, "heat", "First divergence by layer and op")
