"""Figures in words: what a lane measured, short enough for a table."""

from harness.lane.results import FigureLine, LaneRecord

#: Values from the first up to the second are written without an exponent.
WHOLE_FROM, WHOLE_TO = 1e2, 1e9


def number(value: object) -> str:
    """Write a measured value with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def significant(value: object) -> str:
    """Write a measured value for people: three significant digits, and no Python or JSON.

    A mapping becomes ``name value, name value``, a sequence ``value, value``. Integers are counts and stay whole.
    """
    if isinstance(value, float):
        text = f"{value:.3g}"
        return f"{float(text):.0f}" if WHOLE_FROM <= abs(value) < WHOLE_TO else text
    if isinstance(value, dict):
        return ", ".join(f"{name} {significant(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(significant(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return str(value)


def figure_text(pristine: FigureLine | None, patched: FigureLine | None) -> str:
    """Write a figure of both lanes, such as ``max_error 0.25 -> 0.0031``."""
    values = [number(line.value) for line in (pristine, patched) if line]
    line = pristine or patched
    if line is None:
        return ""
    unit = f" {line.unit}" if line.unit not in ("", "1") else ""
    return f"{line.name} {' -> '.join(values)}{unit}"


def leading(name: str, pristine: LaneRecord | None, patched: LaneRecord | None) -> str:
    """Write the figure of that name of both lanes; empty where neither lane printed it."""
    return figure_text(pristine.figure(name) if pristine else None, patched.figure(name) if patched else None)
