"""A page in a browser without a screen: as wide as a phone and as a desk, in both themes, whatever names are in it.

A second page, which may run a script, has the first one in a frame and measures it. Needs chromium, as Debian has it.
"""

from __future__ import annotations

import html as escapes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.reports import html
from normcheck.result import SweepResult
from tests.hostile_text import HARM
from tests.sample_runs import failed, failing, finding, passing, run, verdict

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

MEASURE = """<!doctype html><meta charset="utf-8"><style>
iframe {{ border: 0; height: 900px; }}</style>
{frames}<pre id="seen"></pre><script>
const measured = frame => {{
  const inside = frame.contentDocument, root = inside.documentElement;
  const shown = e => getComputedStyle(e), all = [...inside.querySelectorAll("*")];
  const outside = e => e.getBoundingClientRect().right > root.clientWidth + 1;
  const beyond = all.filter(e => outside(e) && !e.closest(".scroll, pre, svg"));
  return {{
    wide: root.scrollWidth, room: root.clientWidth, beyond: beyond.map(e => e.outerHTML.slice(0, 200)),
    background: shown(inside.body).backgroundColor, ink: shown(inside.body).color,
    padding: shown(inside.body).paddingLeft, title: inside.title, heading: inside.querySelector("h1").textContent,
    wrong: [...inside.querySelectorAll("td.w2")].map(e => shown(e).backgroundColor),
    axes: [...inside.querySelectorAll("svg text")].slice(0, 1).map(e => shown(e).fill),
    scripts: [...inside.scripts].map(e => e.type), tall: root.scrollHeight,
    text: inside.body.innerText,
    cut: [...inside.querySelectorAll("pre")].filter(e => e.scrollWidth > e.clientWidth).length,
    verdicts: [...inside.querySelectorAll(".verdict")].map(e => e.getBoundingClientRect().right),
    names: [...inside.querySelectorAll("#matrix ~ .scroll tbody th")].map(e => e.getBoundingClientRect().width),
  }};
}};
addEventListener("load", () => {{
  document.getElementById("seen").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measured));
}});
</script>"""
FRAME = '<iframe src="{page}" style="width: {width}px"></iframe>'


COLOURS = {
    "light": ("rgb(255, 255, 255)", "rgb(26, 28, 31)"),
    "dark": ("rgb(20, 23, 26)", "rgb(230, 232, 234)"),
}
"""Background and text of a page."""


def seen(
    tmp_path: Path, runs: Iterable[SweepResult], widths: Sequence[int], theme: str
) -> tuple[list[dict[str, Any]], str]:
    """What a browser shows of the page of each of ``runs``, in each width, and what it complains of.

    All of them stand in one page: to start a browser takes longer than to draw them.
    """
    frames = []
    for number, a_run in enumerate(runs):
        page = f"report_{number}.html"
        with open(tmp_path / page, "w", encoding="utf-8") as stream:
            html.write(a_run, stream)
        frames += [FRAME.format(page=page, width=width) for width in widths]
    (tmp_path / "measure.html").write_text(MEASURE.format(frames="<br>".join(frames)), encoding="utf-8")
    assert CHROMIUM is not None
    options = (
        *("--headless", "--disable-gpu", "--no-first-run", "--enable-logging=stderr", "--allow-file-access-from-files"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"),
        f"--window-size={max(widths) + 40},1000",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *(["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []),
    )
    command = (CHROMIUM, *options, "--dump-dom", (tmp_path / "measure.html").as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall('<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(escapes.unescape(found)), "\n".join(complaints)


def as_it_is() -> SweepResult:
    long = failed(replace(finding(), reproduce="normcheck repro " + "long" * 50), implementation="name" * 50)
    return replace(
        failing(), verdicts=(*failing().verdicts, failed(finding(), dtype="fp32"), *passing().verdicts, long)
    )


def of_harm() -> SweepResult:
    """A failure and a pass under each name that means harm."""
    wrong = [failed(replace(finding(), case=harm, reproduce=harm), implementation=harm, file=harm) for harm in HARM]
    right = [verdict(implementation=f"{harm}!", spread={"N": {"1": 0.5}}) for harm in HARM]
    markup = '<script>document.body.remove()</script><img src=x onerror="document.body.remove()">' + "long" * 200
    return run(*wrong, *right, verdict(implementation=markup), status="fail", exit_code=1, messages=HARM)


@pytest.mark.parametrize("theme", COLOURS)
def test_it_is_read_at_every_width_and_in_both_themes(tmp_path: Path, theme: str) -> None:
    widths = (360, 390, 1280)
    pages, complaints = seen(tmp_path, (as_it_is(), of_harm()), widths, theme)
    assert complaints == ""  # the policy refused nothing that the pages need
    for page, width in zip(pages, 2 * widths, strict=True):
        require_readable(page, width, theme)


def require_readable(page: dict[str, Any], width: int, theme: str) -> None:
    assert page["wide"] <= page["room"] <= width, page["beyond"]  # wide tables scroll by themselves
    assert page["beyond"] == []
    assert page["verdicts"] and max(page["verdicts"]) < width  # in sight before anybody scrolls, whatever the names
    assert max(page["names"]) < width
    assert page["cut"] == 0 or width > 640  # on a telephone no line of a failure's text goes on out of sight
    background, ink = COLOURS[theme]
    assert (page["background"], page["ink"]) == (background, ink)
    assert page["axes"] == [ink]
    assert page["padding"] == "16px"  # the style sheet was taken
    assert len(set(page["wrong"])) == 1 and background not in page["wrong"]
    assert (page["heading"], page["scripts"]) == ("FAIL", ["application/json"])
    assert page["tall"] > 1000
    assert "What it stands on" in page["text"]


def test_a_browser_sees_what_the_policy_refuses(tmp_path: Path) -> None:
    """The test of the test: an inline style, an inline script and a picture from elsewhere are each complained of."""
    harm = '<p style="color: red">x</p><script>1</script><img src="https://example.org/x.png">'
    write = html.write
    with pytest.MonkeyPatch.context() as patched:

        def with_harm(a_run: SweepResult, stream: Any) -> None:
            import io

            whole = io.StringIO()
            write(a_run, whole)
            stream.write(whole.getvalue().replace("</main>", f"{harm}</main>"))

        patched.setattr(html, "write", with_harm)
        _, complaints = seen(tmp_path, [passing()], [800], "light")
    assert complaints.count("Content Security Policy") >= 3 or complaints.count("violates") >= 3, complaints
