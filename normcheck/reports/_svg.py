"""Pictures of a page as SVG within it: matplotlib's figures, without what a content policy refuses.

matplotlib writes colours and widths as ``style`` attributes, which become presentation attributes here. Text and axes
take the colour of the page, so that a picture is right in the dark as well.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

INK = "#010203"
"""The colour of text and axes in a figure, for which a page puts its own."""

LINES = ("#4477aa", "#ee6677", "#228833", "#a8901c", "#3aa5cf", "#aa3377", "#bb7711", "#888888")
"""Colours that colour-blind readers tell apart, and that show on white and on black (after Paul Tol)."""

MARKERS = "os^Dv<>P"

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_LEFT_TO_THE_PAGE = ("font", "font-family", "stroke-miterlimit")
_DIGITS = re.compile(r"(?<=[ \"(])(-?\d+\.\d)\d+(?=[ \")])")
"""Coordinates, in 1/72 of an inch: a tenth of that is nothing to see."""

_REFERENCE = re.compile(r"#([\w-]+)")
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, and found by a search
    "svg.hashsalt": "normcheck",
    "text.parse_math": False,  # a name with two dollar signs is a name
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, to be drawn in the block with the settings of a page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure(figsize=(width, height), layout="constrained")


def inline(figure: Figure, label: str, number: int) -> Markup:
    """``figure`` as an element of a page. ``label``: what it shows, in words; ``number``: of the picture."""
    from markupsafe import Markup

    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a glyph: the reader's has it
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(stream.getvalue())  # our own text
    used = {name for e in root.iter() for value in e.attrib.values() for name in _REFERENCE.findall(value)}
    for element in root.iter():
        _plain(element, used, f"p{number}-")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    for parent in root.iter():
        for child in [c for c in parent if c.tag in ("metadata", "style") or (c.tag == "defs" and not len(c))]:
            parent.remove(child)
    text = re.sub(r"\n\s*", "", ElementTree.tostring(root, encoding="unicode"))
    return Markup(_DIGITS.sub(r"\1", text))


def _plain(element: Any, used: set[str], prefix: str) -> None:
    """Give ``element`` presentation attributes in place of its style, and ids that are its picture's own."""
    element.tag = element.tag.removeprefix(_SVG).rpartition("}")[2]
    given = dict(element.attrib)
    element.attrib.clear()
    for pair in given.pop("style", "").split(";"):
        name, colon, value = pair.partition(":")
        if colon and name.strip() not in _LEFT_TO_THE_PAGE:
            element.set(name.strip(), _coloured(value.strip()))
        elif name.strip() == "font":
            element.set("font-size", value.split()[0])
    for name, value in given.items():
        if name == "id":
            if value in used:
                element.set("id", prefix + value)
        else:
            linked = _REFERENCE.sub(rf"#{prefix}\1", value) if name == _LINK or value.startswith("url(") else value
            element.set("href" if name == _LINK else name, _coloured(linked))


def _coloured(value: str) -> str:
    return "currentColor" if value == INK else value


def pieces(cells: Sequence[Sequence[str]]) -> list[list[Mapping[str, int | str]]]:
    """Rows of cells, equal neighbours as one piece: where it begins (``x``), how ``wide`` it is, and its ``kind``."""
    rows: list[list[Mapping[str, int | str]]] = []
    for row in cells:
        found: list[Mapping[str, int | str]] = []
        x = 0
        for kind, run in groupby(row):
            wide = len([*run])
            found.append({"x": x, "wide": wide, "kind": kind})
            x += wide
        rows.append(found)
    return rows
