"""Vector drawings in inches from the top left, in light and dark, the same text each time."""

import io
import re

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

# Light colours (links are Okabe and Ito's), each with the one that takes its place in the dark.
PAPER, BAND, EMPTY, MUTED, INK = "#ffffff", "#f2f3f5", "#d9dce1", "#6b7280", "#111827"
TOKENS, KEYS, WEIGHTS, PARTIAL = "#009e73", "#cc79a7", "#b8860b", "#7e6bc4"
LINKS, RAIL = "#0072b2", "#d55e00"
DARK = {
    PAPER: "#15181d",
    BAND: "#21262d",
    EMPTY: "#3a414b",
    MUTED: "#9aa3af",
    INK: "#e5e7eb",
    TOKENS: "#2fc79a",
    KEYS: "#e39fc4",
    WEIGHTS: "#e0b13c",
    PARTIAL: "#a899ea",
    LINKS: "#56b4e9",
    RAIL: "#ff8f3f",
}


def canvas(height: float, width: float):
    """A figure in inches, from the top left."""
    figure = Figure((width, height), facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return figure, ax


def write(ax, x, y, text, colour=INK, points=8.5, **options):
    options = {"ha": "center", "va": "center"} | options
    ax.text(x, y, text, color=colour, fontsize=points, linespacing=1.15, **options)


def rectangle(x, y, w, h):
    return [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]


def shape(ax, lines, *, closed: bool = False, **style):
    """Many lines, or polygons, as one element of the drawing."""
    vertices, codes = [], []
    for line in lines:
        vertices += line + line[:1] * closed
        ends = [Path.CLOSEPOLY] if closed else []
        codes += [Path.MOVETO] + [Path.LINETO] * (len(line) - 1) + ends
    ax.add_patch(PathPatch(Path(vertices, codes), **style))


def to_svg(figure: Figure, title: str) -> str:
    """The same text each time; dark where the reader's browser is."""
    out = io.StringIO()
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        keys = ("Date", "Creator", "Format", "Type")
        figure.savefig(out, format="svg", metadata={"Title": title} | dict.fromkeys(keys))
    # Colours stay written at each shape: a viewer that knows no style sheets draws the light one.
    rules = " ".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>\n</svg>"
    text = out.getvalue().replace("</svg>", style)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # a hundredth of a point is enough
    text = re.sub(r"font-family: [^;]*;", "font-family: Helvetica, Arial, sans-serif;", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
