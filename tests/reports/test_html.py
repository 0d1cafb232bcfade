"""The page of a run: what it says, that nothing foreign in it comes alive, and that it is the JSON report as well."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from normcheck.circumstances import Configured, InContext, Ran
from normcheck.errors import UsageError, to_install
from normcheck.reports import html, json_reader
from normcheck.reports import json as json_report
from normcheck.reports._svg import LINES, figure, inline, pieces
from normcheck.result import Steadiness, SweepResult
from tests.command_line import Cli
from tests.hostile_text import HARM
from tests.inner_loop import parametrize
from tests.pages import Page, require_sound
from tests.sample_runs import RUNS, failed, failing, finding, hostile, large, passing, run, skipped, verdict, worst

ALL = {**RUNS, "hostile": hostile, "large": large}
ROOT = Path(html.__file__).parent
STYLE = (ROOT / "templates" / "style.css").read_text(encoding="utf-8")


def page_of(a_run: SweepResult) -> str:
    stream = io.StringIO()
    html.write(a_run, stream)
    assert stream.getvalue().isascii()  # whatever the encoding of a pipe is
    return stream.getvalue()


@cache
def page_of_failure() -> str:
    """The page of one cell that failed."""
    return page_of(run(failed(finding()), status="fail", exit_code=1))


@cache
def usual_tags() -> frozenset[str]:
    """The elements of a page in which no text means harm."""
    page = page_of(replace(failing(), verdicts=(failed(finding()), verdict(), skipped())))
    return frozenset(tag for tag, _ in Page(page).elements)


def read_from(page: str) -> str:
    """A page with characters in place of their numbers."""
    return re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), page)


@parametrize("name", ALL, inner=1)
def test_it_is_whole_and_the_json_report_as_well_and_nothing_in_it_runs_or_is_fetched(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its pictures, of which each takes half a second, if its numbers are those of no other run."""
    if name not in ("fail", "nonfinite", "large"):
        monkeypatch.setattr(html, "_pictures", lambda verdicts: [])
    page = page_of(ALL[name]())
    require_sound(page)
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    with open(tmp_path / "report.json", "w", encoding="utf-8") as stream:
        json_report.write(ALL[name](), stream)
    as_page, as_json = (json_reader.read(str(tmp_path / f"report.{form}")) for form in ("html", "json"))
    assert json_report.document(as_page) == json_report.document(as_json)


def require_text(harm: str) -> None:
    """In names, messages, cases, reasons: wherever a report shows what somebody else wrote."""
    found = replace(finding(), case=harm, reproduce=harm, message=harm, cause=harm)
    wrong = failed(found, implementation=harm, op=harm, file=harm, known=harm)
    other = replace(passing(), messages=(harm, f"drift from {harm}"), argv=("verify", harm), environment={harm: harm})
    verdicts = (wrong, verdict(implementation=harm, spread={harm: {harm: 0.5}, "N": {harm: 1.0}}), skipped(detail=harm))
    text = page_of(replace(other, verdicts=verdicts))
    assert {tag for tag, _ in Page(text).elements} <= usual_tags() | {"p", "li", "ul"}
    require_sound(text)


@pytest.mark.slow
@parametrize("harm", HARM, inner=7)
def test_foreign_text_is_text(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual_tags()
    monkeypatch.setattr(html, "_pictures", lambda verdicts: [])
    require_text(harm)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(3))
def test_foreign_text_in_a_picture_is_text(turn: int) -> None:
    """A third of what means harm is one name: a picture takes half a second, and escapes each character by itself."""
    require_text(" ".join([*HARM][turn::3]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!doctype html><p>nothing", "0 elements of the page have the id normcheck-report"),
        ('<!doctype html><script id="normcheck-report">{}</script>' * 2, "2 elements of the page"),
        ('<!doctype html><script id="normcheck-report">{"a": 1, "a": 2}</script>', "a key of an object is there twice"),
        ("<!doctype html><![x[ y", "expected normcheck-report/1, in JSON"),
        ('<!doctype html><script id="normcheck-report">[]</script>', "schema=[]: expected normcheck-report/1"),
    ],
)
def test_another_page_is_no_report(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "other.html").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(said)):
        json_reader.read(str(tmp_path / "other.html"))


@pytest.mark.slow
def test_an_edited_report_is_drawn_as_far_as_it_goes() -> None:
    """Axes without values, and a map whose rows have other lengths, are what no run of ours writes."""
    odd = replace(finding(), where=replace(finding().where, ratios=((1.0, 2.0), ())))  # type: ignore[type-var]
    a_run = run(failed(odd), verdict(spread={"M": {}}), verdict(dtype="fp16", spread={"N": {"x": math.nan}}))
    assert 'class="heat"' not in page_of(a_run)


@pytest.mark.slow
def test_merge_reads_pages(cli: Cli, tmp_path: Path) -> None:
    shards = []
    for number in (1, 2):
        shards.append(str(tmp_path / f"{number}.html"))
        done = cli(
            *("verify", "--op", "rmsnorm", "--impl", "torch", "--dtype", "fp16", "--device", "cpu"),
            *("--max-examples", "8", "--allow-thin", "--shard", f"{number}/2", "--report", f"html:{shards[-1]}"),
            *("--no-contexts", "--no-isolation"),
        )
        assert done.code in (0, 4), done.err
    both = tmp_path / "both.html"
    merged = cli("merge", *shards, "--allow-thin", "--report", f"html:{both}")
    assert merged.code in (0, 4), merged.err
    cells = [json_reader.read(path).verdicts[0] for path in (*shards, str(both))]
    assert cells[2].cases == cells[0].cases + cells[1].cases
    for axis in ("M", "N", "eps", "rows", "dy", "layout"):
        for value, ratio in cells[2].spread[axis].items():
            assert ratio == max(cell.spread[axis].get(value, 0.0) for cell in cells[:2])
    assert max(cells[2].spread["N"].values()) == pytest.approx(max(w.ratio for w in cells[2].worst.values()), rel=0.01)


# what it says


def test_the_order_of_its_parts() -> None:
    drifted = replace(failing(), messages=("drift from base.json: rmsnorm triton bf16 y: worst ratio 0.1 to 0.9",))
    again = {"y": Steadiness(differ=2, cases=9)}
    page = Page(page_of(replace(drifted, verdicts=(*drifted.verdicts, verdict(dtype="fp32", repeats=again)))))
    assert [heading for heading in page.headings[1:] if ":" not in heading] == [
        "FAIL",
        "What it stands on",
        "Not checked",
        "Error over bound",
        "What is wrong",
        "Where the error is large",
        "rmsnorm",
        "Again, among other rows, and in memory",
        "Drift from the baseline",
        "How it was made",
    ]
    assert "other bits: y in 2 of 9" in page.text
    assert "worst ratio 0.1 to 0.9" in page.text


@pytest.mark.slow
def test_contexts_configurations_and_what_ran_are_a_table() -> None:
    held = InContext(status="held", cases=3)
    cannot = InContext(status="not tried", why="<b>it waits for the GPU</b>")
    found = Configured(judged=3, allowed=4, cannot={"_fwd:2": "shared memory"}, why="its time")
    ran = Ran(M=3, N=64, forward=("rms_small",), backward=())
    cell = verdict(contexts={"again": held, "graph": cannot}, configurations=found, ran=(ran,))

    text = Page(page_of(run(cell))).text

    assert "again: held; graph: not tried (<b>it waits for the GPU</b>)" in text
    assert "3 of 4 judged; its time; _fwd:2: shared memory" in text
    assert "forward: rms_small" in text
    assert "what ran" not in Page(page_of(run(verdict()))).text


def test_the_terminals_text_of_a_failure_is_unchanged() -> None:
    page = Page(page_of_failure())
    assert "  Mismatched elements: 3 / 387 (0.8%)\n" in page.text
    assert "Reproduce: normcheck repro mine.py 'rmsnorm fp16 M=3 N=129" in page.text


def test_a_colour_has_a_mark_beside_it() -> None:
    """Whoever does not see the colour reads the same."""
    wrong = failed(finding(), worst={"y": worst(0.5), "dx": worst(3.05)}, not_returned=("rstd",))
    text = page_of(run(wrong, verdict(worst={"y": worst(0.004), "dx": worst(math.inf)}), status="fail", exit_code=1))
    fields = re.findall(r'<td class="number (\w*)">([^<]*)</td>', read_from(text))
    assert fields[:3] == [("r3", "✓ 0.5"), ("", "-"), ("w2", "✗ 3.05")] or ("r3", "✓ 0.5") in fields
    for field in [("r3", "✓ 0.5"), ("w2", "✗ 3.05"), ("r0", "✓ 0.004"), ("w4", "✗ inf")]:
        assert field in fields
    for kind, ratio in [("r4", 1.0), ("w1", 1.0001), ("w4", math.inf), ("w4", math.nan)]:
        assert html._colour(ratio) == kind


def test_the_map_of_a_failure() -> None:
    """Three rows of 43 parts; the last part of the last row is wrong."""
    text = page_of_failure()
    (drawn,) = re.findall(r'<svg class="heat".*?</svg>', text, re.DOTALL)
    parts = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="18" class="(\w+)"/>', drawn)
    width = 576 // 43
    assert parts == [
        ("0", "0", str(43 * width), "r3"),
        ("0", "18", str(43 * width), "r1"),
        ("0", "36", str(42 * width), "r0"),
        (str(42 * width), "36", str(width), "w2"),
    ]
    assert "Error over bound in the 3 x 129 elements" in drawn and "at most 3.05" in drawn


def test_the_terms_of_the_bound_and_their_shares() -> None:
    text = page_of_failure()
    rows = re.findall(r'<th scope="row">(\S+)</th><td class="number">(\S+)</td><td class="number">(\S+)</td>', text)
    assert [row[0] for row in rows if row[2].endswith("%")] == ["store", "rstd", "c1", "c2", "ops", "underflow"]
    assert ("store", "1.5e-04", "75.0%") in rows
    assert '<rect width="75.0" height="10"/>' in text


@pytest.mark.slow
def test_it_is_small() -> None:
    """36 cells of 111 cases, half of them wrong. Of a run of everything known, 90 cells, it would have a megabyte."""
    axes = {
        "M": {str(1 << k): 0.999 for k in range(17)},
        "N": {str(1 << k): 0.999 for k in range(17)},
        "eps": {f"1e-{k:02d}": 0.5 for k in range(12)},
        "rows": {f"kind_of_x_{k}": 0.5 for k in range(20)},
        "dy": {f"kind_of_dy_{k}": 0.5 for k in range(12)},
        "layout": {f"layout_{k}": 0.5 for k in range(9)},
    }
    cells = [
        verdict(op=op, implementation=f"implementation_{i}", dtype=dtype, spread=axes, cases=111)
        for op in ("layernorm_relu_bitmask", "rmsnorm")
        for i in range(6)
        for dtype in ("fp16", "bf16", "fp32")
    ]
    cells = [replace(cell, status="fail", failure=finding()) if n % 2 else cell for n, cell in enumerate(cells)]
    a_run = run(*cells, status="fail", exit_code=1)
    assert sum(cell.cases for cell in a_run.verdicts) == 3996
    assert len(page_of(a_run).encode()) < 410_000


@pytest.mark.slow
def test_failures_beyond_the_most_are_counted() -> None:
    cells = [failed(finding(), dtype=f"d{n}") for n in range(html.MOST_FAILURES + 2)]
    page = Page(page_of(run(*cells, status="fail", exit_code=1)))
    assert "and 2 more failures, in the matrix and in the JSON report" in page.text


# its colours


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_read_on_every_colour(theme: int) -> None:
    found = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[theme]
    colours = dict(re.findall(r"--(\w+): (#\w{6});", found))
    fields = [name for name in colours if re.fullmatch(r"[rw]\d", name)]
    assert len(fields) == 9
    for name in (*fields, "page", "panel"):
        assert contrast(colours["ink"], colours[name]) >= 4.5, name
    for name in ("faint", "link", "pass", "fail", "thin"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    for colour in LINES:
        assert contrast(colour, colours["page"]) >= 2, colour


# pictures


def test_a_picture_has_no_style_and_names_of_its_own() -> None:
    drawn = []
    for number in (1, 2):
        with figure(4, 3) as drawing:
            axes = drawing.add_subplot()
            axes.plot([1, 2], [1, 2], marker="o", label="$a$ <b> \u4e2d")
            axes.legend()
            drawn.append(str(inline(drawing, '"what" <it> shows', number)))
    for text in drawn:
        assert "style=" not in text and "<style" not in text and "DejaVu" not in text
        assert "$a$ &lt;b&gt; \u4e2d" in text
        assert 'aria-label="&quot;what&quot; &lt;it&gt; shows"' in text
        assert "currentColor" in text
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in drawn]
    assert ids[0] and not ids[0] & ids[1]
    for text, own in zip(drawn, ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([\w-]+)', text)) <= own


def test_pieces_are_neighbours_of_one_kind() -> None:
    assert pieces([["a", "a", "b"], ["b"]]) == [
        [{"x": 0, "wide": 2, "kind": "a"}, {"x": 2, "wide": 1, "kind": "b"}],
        [{"x": 0, "wide": 1, "kind": "b"}],
    ]


def test_a_report_without_what_draws_it_is_refused_at_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from normcheck.reports import targets

    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    done = cli("verify", "--op", "rmsnorm", "--report", "html:out.html")
    assert done.code == 2
    assert f"report=html:out.html: expected jinja2 and matplotlib; {to_install('plot')}" in done.err
    assert json.dumps(done.out) == '""'
