"""Text for people: numbers in few characters, and foreign strings that cannot harm the terminal they are shown on.

Everything that a report prints goes through ``put``. Names, messages and tracebacks come from other people's code: no
markup in them works, control characters are shown as escapes, and long text is cut.
"""

from __future__ import annotations

import math
import os
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normcheck.errors import cut, one_line, visible

Part = str | tuple[str, str] | Text
"""A piece of a line: text, (text, Rich style), or a Text that ``text_of`` or ``table_lines`` has made."""

STATUS_STYLES = {"pass": "green", "thin": "bold yellow", "fail": "bold red", "skip": "yellow", "error": "bold magenta"}

LONGEST_MESSAGE = 2_000
LONGEST_NAME = 120
MOST_LINES = 24
_UNLIMITED_COLUMNS = 10_000


def console_for(stream: TextIO, *, width: int | None = None) -> Console:
    """A console on ``stream``: plain text in a pipe or under NO_COLOR, under which Rich by itself would send bold."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        file=stream,
        width=width,
        color_system=None if plain else "auto",
        force_jupyter=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def unicode_ok(console: Console) -> bool:
    """Whether block characters can be written to this console."""
    return console.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "utf-16", "utf-32", "utf-8-sig")


def put(console: Console, *parts: Part, indent: int = 0, hang: int = 0, wrap: bool = True) -> None:
    """Print one line, indented by ``indent`` columns and wrapped at words; from its second line on by ``hang`` more.

    ``wrap=False`` never inserts a newline, for lines that are pasted or read with ``tail -1``.
    """
    text = text_of(console, *parts)
    if not wrap or indent + cell_len(text.plain) <= console.width:
        _emit(console, indent, text)
        return
    narrow = max(console.width - indent - hang, 20)
    for number, line in enumerate(text.wrap(console, narrow, overflow="fold")):
        line.rstrip()
        _emit(console, indent + (hang if number else 0), line)


def text_of(console: Console, *parts: Part) -> Text:
    """``parts`` as one line that this console can show, without anything that controls it."""
    return Text.assemble(*(_safe(part, console.encoding) for part in parts))


def put_lines(console: Console, message: str, *, indent: int = 0, label: str = "", style: str = "") -> None:
    """Print a foreign message of any size: its lines one by one, long lines wrapped, the middle of a huge one cut."""
    for number, line in enumerate(lines_of(message)):
        first = label if number == 0 else " " * len(label)
        put(console, first, (line, style), indent=indent, hang=len(label))


def table_lines(console: Console, table: Table, *, wrap: bool = True) -> list[Text]:
    """The lines of a table, the header first, without Rich's trailing blanks, which a log would keep.

    ``wrap=False``: as wide as the table needs, on any console.
    """
    options = console.options if wrap else console.options.update(width=_UNLIMITED_COLUMNS)
    lines = []
    for line in console.render_lines(table, options, pad=False):
        lines.append(Text.assemble(*((segment.text, segment.style or "") for segment in line)))
        lines[-1].rstrip()
    return lines


def _emit(console: Console, indent: int, text: Text) -> None:
    if text.plain.lstrip().startswith("::"):  # a CI log takes such a line for a command
        text, indent = Text("\\") + text, max(indent - 1, 0)
    if console.is_terminal or console.color_system is not None:
        console.print(Text(" " * indent) + text, soft_wrap=True)
    else:  # Rich would write the same, in five times the time
        console.file.write(f"{' ' * indent}{text.plain}\n")


def _safe(part: Part, encoding: str) -> tuple[str, str] | Text:
    if isinstance(part, Text):
        return part
    text, style = (part, "") if isinstance(part, str) else part
    return visible(text).encode(encoding, "backslashreplace").decode(encoding), style


def short(text: str, limit: int = LONGEST_NAME) -> str:
    """``text`` on one line of at most ``limit`` characters, its end replaced by ``...`` if it must be."""
    return one_line(text, limit, keep_end=False)


def lines_of(message: str, most: int = MOST_LINES) -> list[str]:
    """The lines of a cut message without blank edges: at most ``most``, the middle left out."""
    lines = [line.rstrip().expandtabs(4) for line in cut(message, LONGEST_MESSAGE).strip("\r\n").splitlines()]
    if len(lines) <= most:
        return lines
    tail = most // 3
    head = most - tail - 1
    return [*lines[:head], f"... [{len(lines) - head - tail} lines cut] ...", *lines[-tail:]]


def compact(value: float | None) -> str:
    """A number in few characters: ``0.999``, ``12.4``, ``1.3e-04``, ``inf``, ``nan``; ``-`` for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else f"{value:g}"
    text = f"{value:.3g}"
    return text if 1e-3 <= abs(value) < 1000 and "e" not in text else f"{value:.1e}"


def ratio(value: float | None) -> str:
    """A ratio, never rounded across 1, the limit between right and wrong."""
    if value is None or not 0.99 < value < 1.01 or value == 1:
        return compact(value)
    return f"{(math.floor if value < 1 else math.ceil)(value * 1000) / 1000:.3f}"


_FAR = 1e6


def ulps(value: float | None) -> str:
    """Units in the last place: ``0.5``, ``12.4``, ``1,234``; ``far`` for a million and more, which say nothing more."""
    if value is not None and abs(value) >= _FAR:
        return "far"
    return f"{value:,.0f}" if value is not None and abs(value) >= 999.5 else compact(value)


def in_ulps(value: float | None) -> str:
    """A distance in words: ``12.4 ulp``, ``far``."""
    text = ulps(value)
    return text if text == "far" else f"{text} ulp"


def most_ulps(value: float | None, at_most: str = "at most") -> str:
    """The largest of several distances in words: ``at most 12.4 ulp``, ``some of them far``."""
    text = in_ulps(value)
    return "some of them far" if text == "far" else f"{at_most} {text}"


def exact(value: float | None) -> str:
    """A number with all the digits that tell one fp32 value from the next."""
    return "-" if value is None else f"{value:.9g}"


def percent(part: float, whole: float) -> str:
    """``part`` of ``whole`` to a tenth of a percent; 0% means none and 100% means all."""
    if not whole or math.isnan(part) or math.isnan(whole):
        return "-"
    share = part / whole
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}" if 0 < share < 1 else f"{share:.0%}"


def seconds(value: float | None) -> str:
    """A duration: ``0.42 s``, ``12.3 s``, ``1,234 s``."""
    if value is None or not math.isfinite(value):
        return "- s"
    if value < 0.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 99.95 else f"{value:,.0f} s"


def counted(count: int, noun: str) -> str:
    """``1 case``, ``1,284 cases``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
