"""The waterfall of a speed-up: from the ideal n × down to the actual one, one bar per loss.

4 × ██
    ██ ▒▒ imbalance
    ██    ▒▒ bubble
    ██       ▒▒ transfer      ██ 2.8 ×
"""

from __future__ import annotations

from pathlib import Path

from stagewright.planner.explain import Explanation
from stagewright.quantity import format_s
from stagewright.report.figures.file import write_figure
from stagewright.report.figures.style import draw_grid, new_figure, write_caption
from stagewright.report.palette import INK, MUTED, stage_color, tint
from stagewright.simulator.what_if import SpeedupBreakdown


def plot_explanation(explanation: Explanation, path: str | Path) -> Path:
    """Draw an explanation's waterfall with its advice as the caption."""
    caption = f"best change: {explanation.advice}"
    return draw_waterfall(explanation.parts, path, title=explanation.title, caption=caption)


def draw_waterfall(parts: SpeedupBreakdown, path: str | Path, *, title: str, caption: str = "") -> Path:
    """Draw the waterfall into a .png, .svg or .pdf file and return its path."""
    shown = [
        (part.name, part.seconds, lost)
        for part, (_, lost) in zip(parts.parts, parts.lost_speedup(), strict=True)
        if abs(part.seconds) >= 1e-4 * parts.step_s
    ]
    figure = new_figure(max(6.4, 1.6 + 1.15 * (len(shown) + 2)), 4.6)
    axes = figure.subplots()
    ideal, actual = float(parts.num_devices), parts.speedup
    good, bad = stage_color(0), stage_color(5)
    axes.bar(0, ideal, 0.72, color=tint(good), zorder=3)
    axes.text(0, ideal, f"{ideal:.2f} ×\n{format_s(parts.ideal_s)}", ha="center", va="bottom", color=INK, fontsize=9)
    speedup = ideal
    for position, (_, seconds, lost) in enumerate(shown, start=1):
        after = speedup - lost
        color = bad if lost > 0 else stage_color(2)
        axes.bar(position, abs(lost), 0.72, bottom=min(speedup, after), color=color, zorder=3)
        axes.plot([position - 1.36, position + 0.36], [speedup, speedup], color=MUTED, linewidth=0.8, zorder=2)
        text = f"{-lost:+.2f} ×\n{'+' if seconds > 0 else '−'} {format_s(abs(seconds))}".replace("-", "−")
        axes.text(position, max(speedup, after), text, ha="center", va="bottom", color=INK, fontsize=8.5)
        speedup = after
    last = len(shown) + 1
    axes.plot([last - 1.36, last + 0.36], [speedup, speedup], color=MUTED, linewidth=0.8, zorder=2)
    axes.bar(last, actual, 0.72, color=good, zorder=3)
    text = f"{actual:.2f} ×\n{format_s(parts.step_s)}"
    axes.text(last, actual, text, ha="center", va="bottom", color=INK, fontsize=10, fontweight="bold")
    names = [f"{parts.num_devices} devices", *(name.replace(" ", "\n") for name, _, _ in shown), "actual"]
    axes.set_xticks(range(last + 1), names, color=INK, fontsize=9)
    axes.set_ylim(0, max(ideal, actual) * 1.18)
    axes.set_ylabel("speed-up over the single-device baseline", color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=20 if caption else 8)
    if caption:
        write_caption(axes, caption)
    draw_grid(axes, "y", ("top", "right", "left"))
    axes.tick_params(axis="y", colors=MUTED, length=3)
    axes.tick_params(axis="x", length=0)
    axes.spines["bottom"].set_color(MUTED)
    return write_figure(figure, path)
