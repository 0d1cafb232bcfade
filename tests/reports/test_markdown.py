"""The comment for a pull request: expected text, and what a Markdown parser makes of foreign strings in it."""

from __future__ import annotations

import io
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from normcheck.reports import markdown
from normcheck.result import SweepResult
from tests.hostile_text import HARM
from tests.sample_runs import RUNS, failed, failing, finding, hostile, known, large, passing, run, skipped, verdict

GOLDEN = Path(__file__).parents[2] / "golden" / "reports"
WIDTHS = (80, 120)
COMMENT = 65_536
"""Characters that GitHub takes."""

OURS = {
    "h2",
    "p",
    "code",
    "ul",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "pre",
    "strong",
}


class Seen(HTMLParser):
    """The tags of a page, and its text by the tag that it stands in."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"class", "style"}
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def seen(text: str) -> Seen:
    page = Seen()
    page.feed(MarkdownIt("commonmark").enable("table").render(text))
    page.close()
    assert page.open == []
    assert set(page.tags) <= OURS
    return page


def text_of(a_run: SweepResult) -> str:
    stream = io.StringIO()
    markdown.REPORT.write(a_run, stream)
    return stream.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RUNS)
def test_whole_report(name: str, width: int, recorded: Callable[[str, str], None]) -> None:
    recorded(f"reports/markdown_{name}_{width}.md", markdown.text_of(RUNS[name](), width))


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("markdown_*")} == {f"markdown_{n}_{w}" for n in RUNS for w in WIDTHS}


@pytest.mark.parametrize("name", [*RUNS, "hostile", "large"])
def test_as_a_parser_sees_it(name: str) -> None:
    a_run = {**RUNS, "hostile": hostile, "large": large}[name]()
    text = text_of(a_run)
    page = seen(text)
    assert len(text) < COMMENT
    assert not any(line.lstrip().startswith("::") for line in text.split("\n"))
    failures = [v for v in a_run.verdicts if v.status in ("fail", "error")]
    if name != "large":
        assert page.tags.count("tr") == 1 + len(a_run.verdicts)
        assert page.tags.count("details") == page.tags.count("pre") == 1 + len(failures)


def test_verdict_then_cells_then_failures() -> None:
    text = text_of(failing())
    places = [text.index(part) for part in ("normcheck: FAIL", "2 of 3 cells failed", "| pass |", "<details>", "quick")]
    assert places == sorted(places)
    assert "At `kernels/mine.py:12`\n" in text
    assert finding().reproduce in text


def test_what_a_reader_of_a_pass_must_know() -> None:
    text = text_of(passing())
    for words in ("not returned: mean, rstd", "uncheckable: y <0.1%", "27 cases skipped", "bounds 1.7 times wider"):
        assert words in " ".join(text.split())


def test_known_failures_are_marked() -> None:
    assert "| known | `rmsnorm` | `mine.py` |" in text_of(known())
    assert "**FAIL**" not in text_of(known())


def test_what_there_is_no_room_for_is_counted() -> None:
    text = text_of(run(*(failed(finding(message="x" * 3000, mismatched=None)) for _ in range(100)), status="fail"))
    told = text.count("<details>") - 1
    assert 5 < told < 100
    assert f"and {100 - told} more failures, in the other reports" in text
    assert len(text) < COMMENT
    assert "more cells, in the other reports" in text_of(run(*[skipped(detail="x" * 200)] * 300, status="nothing"))


@pytest.mark.parametrize(
    "text",
    [
        *HARM,
        "`a`",
        "``` a",
        "a|b",
        "a\\|b",
        "|",
        "`|`",
        "_a_ **b** ~~c~~",
        "<script>alert(1)</script>",
        "</code></details>",
        "&lt;b&gt;",
        "<!--",
        "@someone #1 https://example.org www.example.org a@b.org",
        "![a](b) [c](d)",
        "# a",
        "- a",
        "$`a`$",
        "<b>" * 100_000,
        "`" * 100_000,
        "|`@" * 100_000,
    ],
)
def test_harmful_text(text: str) -> None:
    """A parser finds no tags but ours, foreign text in code alone, and a table of as many columns as it has."""
    failure = finding(message=f"{text}\n```\n{text}", advice=text, mismatched=None, check=text, output=text)
    cells = (
        verdict(op=text, implementation=text, dtype=text, status="fail", failure=failure, file=text, line=3),
        skipped(detail=text),
        verdict(status="error", detail=text),
    )
    a_run = run(*cells, messages=(text,) * 30, environment={text: text}, status="fail", exit_code=1, profile=text)
    written = text_of(a_run)
    assert len(written) < COMMENT
    page = seen(written)
    assert page.tags.count("tr") == 4
    assert page.tags.count("td") == 3 * 8
    assert page.tags.count("details") == 3
    outside = "".join(part for tag, parts in page.text.items() if tag != "code" for part in parts)
    assert all(c.isascii() for c in outside)
    for word in ("@", "script", "example", "boom", "[red]"):
        assert word not in outside


def test_foreign_text_is_shown_as_it_is() -> None:
    page = seen(text_of(run(verdict(implementation="a|b`c\\|d_e_<i>", op="e|f"), skipped(detail="``x``"))))
    assert "e|f" in page.text["code"]
    assert "a|b`c\\|d_e_<i>" in page.text["code"]
    assert "``x``" in page.text["code"]
