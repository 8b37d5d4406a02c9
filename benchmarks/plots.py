"""The plots: share of the copy against H, decode latency against rows, host cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import problems
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measurements import COPIES, Results, is_project

# A provider keeps its colour in every plot; this project's lines are heavier.
COLOURS: dict[str, Any] = {}
PALETTE = plt.get_cmap("tab20").colors
OURS = {"fused": "black", "fused in place": "dimgray", "fused out=": "darkgray"}


def style(name: str) -> dict[str, Any]:
    if name in OURS:
        return {"color": OURS[name], "linewidth": 2.5, "zorder": 3}
    colour = COLOURS.setdefault(name, PALETTE[len(COLOURS) % len(PALETTE)])
    return {"color": colour, "linewidth": 1.2, "linestyle": "--" if name in COPIES else "-"}


def lines(axes: Axes, points: dict[str, list[tuple[float, float]]]) -> None:
    for name, line in points.items():
        x, y = zip(*sorted(line), strict=True)
        axes.plot(x, y, marker="o", markersize=3, label=name, **style(name))


def shares(results: Results, section: str) -> Figure:
    """Share of the copy against H, bf16, as many elements at every H."""
    points: dict[str, list[tuple[float, float]]] = {}
    for case in problems.sweep("bf16", peers=True):
        for name in results.measured(section, case.name):
            share = results.share(section, case.name, name)
            if case.rows * case.cols > 0.9 * problems.ELEMENTS and share is not None and name != "copy":
                points.setdefault(name, []).append((case.cols, share))
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    lines(axes, points)
    axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(problems.WIDE, [str(cols) for cols in problems.WIDE], minor=False, rotation=45)
    axes.set(xlabel="H", ylabel="share of a copy's bandwidth", ylim=(0, None), title=f"{section}, bf16")
    if points:
        figure.legend(loc="outside right upper", fontsize="small")
    return figure


def decode(results: Results) -> Figure:
    """Latency against rows, one panel a width."""
    panels: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for case in results.cases("decode"):
        for name, record in results.measured("decode", case).items():
            panels.setdefault(record["cols"], {}).setdefault(name, []).append((record["rows"], record["us"]))
    figure, grid = plt.subplots(
        1, max(len(panels), 1), figsize=(14, 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (cols, points) in zip(grid[0], sorted(panels.items()), strict=False):
        lines(axes, points)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xlabel="rows", title=f"H = {cols}")
        axes.yaxis.set_major_formatter("{x:g}")
    grid[0][0].set_ylabel("us a call, CUDA graph")
    if panels:
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def host(results: Results) -> Figure:
    """Host cost in multiples of torch.add, one panel a kind of call."""
    sections = ("host-forward", "host-grad", "host-train")
    figure, grid = plt.subplots(1, len(sections), figsize=(14, 4), layout="constrained")
    for axes, section in zip(grid, sections, strict=True):
        bars = {
            name: value
            for case in results.cases(section)
            for name in results.measured(section, case)
            if name != "torch.add"
            and (value := results.multiple(section, case, name, "torch.add")) is not None
        }
        names = sorted(bars, key=lambda name: bars[name])
        axes.barh(
            names,
            [bars[name] for name in names],
            color=["black" if is_project(n) else "tab:blue" for n in names],
        )
        axes.set(title=section, xlabel="multiples of torch.add")
        axes.axvline(1, color="gray", linewidth=0.8, linestyle=":")
    return figure


def draw(results: Results, folder: Path) -> list[Path]:
    """Writes every plot that there are measurements for, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "fused_add_rms_norm"  # the same results give the same file
    figures = {
        "forward": lambda: shares(results, "forward"),
        "backward": lambda: shares(results, "backward"),
        "decode": lambda: decode(results),
        "host": lambda: host(results),
    }
    written = []
    for name, figure_of in figures.items():
        if any(
            section.startswith(name)
            for section in ("forward", "backward", "decode", "host-forward")
            if results.cases(section)
        ):
            figure = figure_of()
            written.append(folder / f"{name}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
            plt.close(figure)
    return written
