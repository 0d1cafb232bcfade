"""Numbers and names that pages say of the code are those of the code: packages, extras, schemas, faults, defaults."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from typing import Any

import pytest

from normcheck.audit.catalogue import controls, mutants
from normcheck.audit.mutants.regimes import REGIMES
from normcheck.audit.rotation import SAMPLED, by_turns
from normcheck.cases.claims import claims_of
from normcheck.cases.core import core
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import FUSED_ADD, GATED, GROUPED, LENGTHS, MODULATED, MODULATED_ADD, OPS, QUANTISED
from normcheck.diagnosis.known import known
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from tests.project.pages import ALL, PAGES, ROOT

CODE = ROOT / "normcheck"
TABLES = FUSED_ADD, QUANTISED, GATED, LENGTHS, MODULATED, MODULATED_ADD, GROUPED
ADDING, QUANTISING, GATING, MEASURING, MODULATING, GATED_ADDING, GROUPING = (
    [op.name for op in table] for table in TABLES
)


def numbers(page: str, pattern: str) -> list[int]:
    """The numbers in a page that match ``pattern``, which has to match once. Its spaces match the end of a line."""
    (found,) = re.findall(pattern.replace(" ", r"\s+"), PAGES[page], re.DOTALL)
    return [int(number) for number in ((found,) if isinstance(found, str) else found)]


def test_the_page_on_the_code_counts_its_packages_and_has_a_row_for_each() -> None:
    page = PAGES["docs/architecture.md"]
    packages = {f"{path.parent.name}/" for path in CODE.glob("*/__init__.py")}
    modules = {path.name for path in CODE.glob("*.py") if not path.name.startswith("__")}
    assert numbers("docs/architecture.md", r"has (\d+) packages and (\d+) modules") == [len(packages), len(modules)]
    rows = re.findall(r"^\| (`[^|]*) \|", page.partition("## The way of a run")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall("`([^`]+)`", row)} == packages | modules


def test_every_extra_that_is_to_be_installed_exists_and_comes_from_the_checkout() -> None:
    """Until it is on PyPI, which README.md says it is not, a name alone would install a stranger's package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [(page, name) for page, text in ALL.items() for name in re.findall(r"pip install '?([^\s']*\[\w+\])", text)]
    assert "not on PyPI yet" in PAGES["README.md"] and named
    for page, name in named:
        where, extra = name.rstrip("]").split("[")
        assert where == "." and extra in project["optional-dependencies"], (page, name)


def test_every_schema_is_named_on_its_page() -> None:
    sources = (path.read_text(encoding="utf-8") for path in CODE.rglob("*.py"))
    schemas = {name for source in sources for name in re.findall(r'^SCHEMA = "(.*)"$', source, re.MULTILINE)}
    schemas = {name for name in schemas if name.startswith("normcheck-")}
    assert len(schemas) >= 7
    assert set(re.findall(r"`(normcheck-[a-z-]+/\d+)`", PAGES["docs/json-schema.md"])) == schemas


ON_CPU = [m for m in mutants().values() if not m.not_exercised and m.device in ("", "cpu")]


def planted(*ops: str) -> int:
    """How many faults an audit plants on a CPU, of all ops or of these."""
    return sum(not ops or bool({*ops} & {*m.ops}) for m in ON_CPU)


def test_the_faults_and_the_correct_kernels_are_counted() -> None:
    faults, right = planted(), len({control.name for control in controls()})
    assert numbers("README.md", r"plants (\d+) faults") == [faults]
    assert numbers("docs/audit.md", r"\b(\d+) faults can be planted on a CPU") == [faults]
    for page in ("README.md", "docs/audit.md"):
        assert numbers(page, r"\| \*\*normcheck\*\* \| \*\*(\d+)\*\* \|.*?\*\*0 of (\d+)\*\* \|") == [faults, right]
    adding, quantising = planted(*ADDING), planted(*QUANTISING)
    assert numbers("docs/fused-add.md", r"plants (\d+) faults") == [adding]
    assert numbers("docs/quantised.md", r"plants (\d+) faults") == [quantising]
    right_adding, right_quantising, right_gated, right_measuring, right_modulated = (
        len({control.name for control in controls() if control.op in ops})
        for ops in (ADDING, QUANTISING, GATING, MEASURING, MODULATING)
    )
    assert numbers("docs/l2norm.md", r"plants (\d+) faults") == [planted(*MEASURING)]
    assert numbers("docs/l2norm.md", r"(\d+) correct kernels stand beside them") == [right_measuring]
    assert numbers("docs/audit.md", r"the (\d+) of \[norms by length\]") == [planted(*MEASURING)]
    assert numbers("docs/gated.md", r"plants (\d+) faults") == [planted(*GATING)]
    assert numbers("docs/gated.md", r"(\d+) correct kernels stand beside them") == [right_gated]
    assert numbers("docs/audit.md", r"The (\d+) of \[gated norms\]") == [planted(*GATING)]
    assert numbers("docs/modulated.md", r"plants (\d+) faults") == [planted(*MODULATING)]
    assert numbers("docs/modulated.md", r"(\d+) correct kernels stand beside them") == [right_modulated]
    assert numbers("docs/audit.md", r"nor the (\d+) of \[modulated norms\]") == [planted(*MODULATING)]
    assert numbers("docs/modulated.md", r"has (\d+) more, `mJ01`") == [planted(*GATED_ADDING)]
    right_gated_add = len({control.name for control in controls() if control.op in GATED_ADDING})
    assert numbers("docs/modulated.md", r"(\d+) further correct kernels stand beside these") == [right_gated_add]
    assert numbers("docs/audit.md", r"nor the (\d+) of those \[with a residual\]") == [planted(*GATED_ADDING)]
    assert numbers("docs/groupnorm.md", r"plants (\d+) faults") == [planted(*GROUPING)]
    right_grouped = len({control.name for control in controls() if control.op in GROUPING})
    assert numbers("docs/groupnorm.md", r"(\d+) correct kernels stand beside them") == [right_grouped]
    assert numbers("docs/audit.md", r"nor the (\d+) of \[norms of groups\]") == [planted(*GROUPING)]
    assert numbers("docs/qk-norm-rope.md", r"plants (\d+) faults") == [planted("qk_norm_rope")]
    right_rotary = len({control.name for control in controls() if control.op == "qk_norm_rope"})
    assert numbers("docs/qk-norm-rope.md", r"(\d+) correct kernels stand beside") == [right_rotary]
    assert numbers("docs/audit.md", r"nor the (\d+) of\s+\[heads that are rotated\]") == [planted("qk_norm_rope")]
    assert numbers("docs/fused-add.md", r"(\d+) correct kernels stand beside them") == [right_adding]
    assert numbers("docs/quantised.md", r"(\d+) correct kernels stand beside them") == [right_quantising]
    assert numbers("docs/audit.md", r"no recipe has, (\d+) those of .*? and (\d+) those of") == [adding, quantising]
    castings = planted("rmsnorm_llama", "rmsnorm_gemma")
    assert numbers("docs/audit.md", r"includes (\d+) faults of `rmsnorm_llama` and `rmsnorm_gemma`") == [castings]
    assert numbers("docs/audit.md", r"faults under each regime, (\d+) in all") == [SAMPLED * len(REGIMES)]


def test_the_cells_of_an_audit_are_counted() -> None:
    page = " ".join(PAGES["docs/audit.md"].split())
    whole, by_turn = sum(len(m.ops) * len(m.dtypes) for m in ON_CPU), sum(len(by_turns(m, DTYPES)) for m in ON_CPU)
    assert f"in every op and dtype that has it, {whole:,} cells." in page
    assert f"in one dtype, by turns, {by_turn:,} cells, as" in page
    right = controls()
    assert f"in each op and dtype, {sum(len(c.dtypes) for c in right):,} cells, or {len(right):,} by turns." in page


def test_the_known_faults_of_a_report_are_counted() -> None:
    least, most = numbers("docs/reading-reports.md", r"of some (\d+) to (\d+) known faults")
    counts = [
        len(known(op, dtype, weight=weight)) for op in OPS.values() for dtype in DTYPES for weight in (True, False)
    ]
    assert (least, most) == (round(min(counts), -1), round(max(counts), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_core_has_as_many_cases_and_shapes_as_the_pages_say(dtype: str) -> None:
    declared = Implementation(name="", op="rmsnorm", forward=lambda *tensors, **numbers: None, ranks=(2, 3))
    made = core(claims_of(OPS["rmsnorm"], declared, dtype), PROFILES["quick"].extent.on("cpu"), 0)
    cases = [one.case for one in made]
    shapes = {(case.M, case.N) for case in cases}
    said = numbers("docs/cases.md", r"of some (\d+) cases on (\d+) shapes")
    assert numbers("README.md", r"some (\d+) cases a cell") == said[:1]
    assert said == pytest.approx([len(cases), len(shapes)], abs=8)


DEFAULTS = {f"--{field.name.replace('_', '-')}": field.default for field in dataclasses.fields(VerifyOptions)}


@pytest.mark.parametrize("option", ["--seed", "--timeout", "--drift-ratio", "--drift-ulp"])
def test_a_page_has_the_default_of_an_option(option: str) -> None:
    said = re.findall(rf"`{option}` \(([\d.]+)(?: s)?\)", "".join(PAGES.values()))
    assert said and {float(number) for number in said} == {float(DEFAULTS[option])}


def record(name: str) -> list[dict[str, Any]]:
    """The verdicts of a run on a GPU that is kept."""
    verdicts = json.loads((ROOT / "golden" / "gpu" / f"{name}.json").read_text(encoding="utf-8"))["verdicts"]
    assert {verdict["status"] for verdict in verdicts} == {"pass"}
    return list(verdicts)


def test_the_page_on_speed_quotes_the_runs_that_are_kept() -> None:
    page = "docs/speed.md"
    seconds = json.loads((ROOT / "golden/gpu/all_implementations.json").read_text(encoding="utf-8"))["seconds"]
    cells = record("all_implementations")
    least = min(cells, key=lambda cell: (cell["cases"], cell["shapes"]))
    cases = sum(cell["cases"] for cell in cells)
    row = f"{len(cells)} cells in {seconds:.0f} s, none failed, none thin; {cases:,} cases, "
    assert f"{row}the least {least['cases']} on {least['shapes']} shapes" in PAGES[page]
    four = ("layernorm", "layernorm_relu_bitmask", "layernorm_zero_centered", "rmsnorm")
    assert f"{sum(cell['cases'] for name in four for cell in record(name)):,} cases with all probes" in PAGES[page]
    llama = record("rmsnorm_llama")
    assert f"pass: {sum(cell['cases'] for cell in llama):,} cases" in PAGES[page] and len(llama) == 6
