"""Text that means harm, from wherever somebody else's text comes: case lines, names, messages, files."""

HARM = (
    "[red]x[/]",
    "[/]",
    "[link=https://example.org]y[/link]",
    "\x1b[2J\x1b[31mred",
    "\x9b31m",
    "\x1b]0;title\x07",
    "first\nsecond\r\x0b\x0c\x85\u2028third",
    "\u202egnp.exe\u2066",
    "::error::file=x",
    "a\n::error::file=x\n  ::stop-commands::x",
    ":boom:",
    "\udc80\ud800",
    "\x00",
    "%s {0} {x!r} \\",
    "e\u0301" * 50,
    "\U0001f600" * 100,
)
"""Strings that do something to a terminal, to Rich, to a CI log or to an encoder."""
