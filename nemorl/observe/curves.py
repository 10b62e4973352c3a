"""Curves of a run's metrics as one SVG image, which model cards show without a script."""

from collections.abc import Iterable, Sequence
from html import escape

from .metrics import SHOWN, StepMetrics, format_number

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 180, 64, 30, 24  # of a panel and its margins, in pixels
_COLUMNS, _MAX_PANELS, _MAX_POINTS = 2, 6, 400
Points = Sequence[tuple[int, float]]  # step and value


def curves_svg(steps: Sequence[StepMetrics]) -> str | None:
    """An image with a panel for each of the main metrics (those with a tile or a column), or None."""
    panels: list[tuple[str, Points]] = []
    for row in SHOWN:
        if not (row.tile or row.column) or row.prefix.startswith(("time/", "idle/", "throughput/", "lr")):
            continue
        found = [(step.step, step.values[row.prefix]) for step in steps if row.prefix in step.values]
        if len(found) > 1:
            panels.append((row.prefix, found))
    panels = panels[:_MAX_PANELS]
    if not panels:
        return None
    rows = -(-len(panels) // _COLUMNS)
    size = f"{_COLUMNS * _WIDTH} {rows * _HEIGHT}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif"',
        ' font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, points) in enumerate(panels):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(name, points), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, points: Points) -> Iterable[str]:
    points = list(points)[:: -(-len(points) // _MAX_POINTS)]
    values = [value for _, value in points]
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM

    def place(step: int, value: float) -> str:
        across = (step - first) / max(1, last - first)
        up = (value - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + width * across:.1f},{_TOP + height * (1 - up):.1f}"

    bottom = _TOP + height
    yield f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(name)}</text>'
    yield f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>'
    for label, at in ((high, _TOP + 9), (low, bottom)):
        yield f'<text x="{_LEFT - 4}" y="{at}" text-anchor="end">{escape(format_number(label))}</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 15}">step {first}</text>'
    yield f'<text x="{_LEFT + width}" y="{bottom + 15}" text-anchor="end">{last}</text>'
    line = " ".join(place(step, value) for step, value in points)
    yield f'<polyline points="{line}" fill="none" stroke="#4a8bd0" stroke-width="1.5"/>'
