"""Small pictures of curves, as SVG."""

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

Curve = Sequence[tuple[int, float]]  # (train step, value)

WIDTH: Final = 240  # pixels
HEIGHT: Final = 120
MARGIN: Final = 18
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")


def picture(title: str, curves: Sequence[Curve], goal: float) -> str:
    """Draw curves of values 0 to 1 over train steps, and the goal as a dashed line."""
    last = max((step for curve in curves for step, _ in curve), default=1)

    def at(step: float, value: float) -> str:
        right, down = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        return f"{MARGIN + step / last * right:.1f},{HEIGHT - MARGIN - min(max(value, 0.0), 1.0) * down:.1f}"

    def line(points: str, style: str) -> str:
        return f'<polyline fill="none" {style} points="{points}"/>'

    frame = f"{at(0, 1)} {at(0, 0)} {at(last, 0)}"
    lines = [
        line(frame, 'stroke="#444"'),
        line(f"{at(0, goal)} {at(last, goal)}", 'stroke="#999" stroke-dasharray="3"'),
    ]
    for number, curve in enumerate(curves):
        points = " ".join(at(step, value) for step, value in curve)
        lines.append(line(points, f'stroke="{COLOURS[number % len(COLOURS)]}"'))
    text = f'<text x="{MARGIN}" y="12" font-family="sans-serif" font-size="11">{escape(title)}, {last} steps</text>'
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{text}{"".join(lines)}</svg>\n'
