"""README.md and the pages of docs/, read as the tests of this folder need them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

FINDINGS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "normcheck" / "findings").glob("*.md"))
}
"""The page of each kind of finding; ``tests/findings`` runs what they show."""

ALL = {**PAGES, **FINDINGS}

SHELL = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block of commands, and the mark before it: ``ci`` or ``not run: WHY``; without one its commands are run here."""

BLOCKS = [(page, mark, block) for page, text in PAGES.items() for mark, block in SHELL.findall(text)]
COMMANDS = tuple(dict.fromkeys(line for _, mark, block in BLOCKS if not mark for line in block.splitlines()))
"""Each is run once, however many pages have it."""


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
