"""What README.md and docs/ say without being run: links, paths, options, tables and the commands that CI takes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tomllib
from typing import Any

import pytest
from typer.main import get_command

from normcheck.audit.recipes import RECIPES
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.cases.layouts import LAYOUTS
from normcheck.cli.app import app
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from normcheck.result import KINDS
from tests.project.pages import ALL, BLOCKS, COMMANDS, PAGES, ROOT, prose
from tests.some import some


def test_four_commands_are_marked_for_ci() -> None:
    page = "docs/contributing.md"
    marked = [block for where, mark, block in BLOCKS if mark == "ci" and where == page]
    assert len(re.findall("^<!-- ci -->$", PAGES[page], re.MULTILINE)) == len(marked) == 4
    install, tests, audit, golden = marked
    assert golden == ".venv/bin/normcheck golden verify golden/cpu/* golden/h200/*\n"
    assert audit == ".venv/bin/normcheck audit --cells turns\n"
    assert "-c tests/constraints.txt -e '.[test]'" in install
    assert "normcheck verify --op rmsnorm --dtype fp16" in install
    assert tests == ".venv/bin/python -m pytest\n"
    assert page in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_a_block_that_is_not_run_says_why_and_is_what_ci_runs_if_it_says_so() -> None:
    ci = [block for _, mark, block in BLOCKS if mark == "ci"]
    assert [page for page, mark, _ in BLOCKS if mark == "ci"] == ["docs/contributing.md"] * 4
    for page, mark, block in BLOCKS:
        assert mark in ("", "ci") or mark.startswith("not run: "), (page, mark)
        assert (block in ci) == (mark == "ci" or "docs/contributing.md" in mark), (page, block)
    assert [block for page, mark, block in BLOCKS if page == "README.md" and "contributing" in mark] == ci[:2]
    marks = sum(text.count("<!--") for text in map(prose, PAGES.values()))
    assert marks == sum(bool(mark) for _, mark, _ in BLOCKS) + prose(PAGES["docs/contributing.md"]).count("`<!--")


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 200


ROOT_COMMAND = get_command(app)


def options(words: list[str]) -> tuple[str, set[str]]:
    """The command that ``words`` begin with, such as ``golden verify``, and its options. Fails if there is none."""
    command: Any = ROOT_COMMAND
    name = ""
    while hasattr(command, "commands"):
        word = words[len(name.split())] if len(words) > len(name.split()) else ""
        if word not in command.commands:
            assert name and not word.isalpha(), f"normcheck has no command {name} {word}"
            break
        command, name = command.commands[word], f"{name} {word}".strip()
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return name, {"--help", *(o for parameter in shown for o in (*parameter.opts, *parameter.secondary_opts))}


@pytest.mark.parametrize("page", ALL)
def test_every_command_and_option_that_a_page_names_exists(page: str) -> None:
    text = ALL[page]
    spans = re.findall(r"`([^`]+)`", " ".join(prose(text).split()))
    known = options(["verify"])[1] | options(["audit"])[1] | options(["compare"])[1]
    named = {option for span in spans if span.startswith("--") for option in re.findall(r"--[a-z-]+", span)}
    assert named <= known, f"{named - known} is in no help of verify, audit or compare"
    lines = [span.removeprefix("normcheck ") for span in spans if re.match(r"normcheck [a-z]", span)]
    lines += re.findall(
        r"normcheck ((?:verify|audit|repro|list|explain|tolerances|golden|bench|compare)\b[^`\n]*)", text
    )
    lines += [f"verify {said}" for said in re.findall(r"^ +arguments: (.*)$", text, re.MULTILINE)]
    lines += [line.partition(" ")[2] for line in COMMANDS if line in text]
    for line in lines:
        name, there = options(line.split())
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line):
            assert option in there, f"{option} is not in normcheck {name} --help"


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "[tool.normcheck]" in text])
def test_every_key_of_a_configuration_is_an_option_of_verify(page: str) -> None:
    for block in some(re.findall(r"^```toml\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)):
        for key in some(tomllib.loads(block)["tool"]["normcheck"]):
            assert f"--{key.replace('_', '-')}" in options(["verify"])[1]


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(page: str) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)\s]+)\)", prose(ALL[page])) if "://" not in link}


def test_every_link_resolves() -> None:
    assert [(page, link) for page in ALL for link in links(page) if not resolves(link, page)] == []


def resolves(link: str, page: str) -> bool:
    target, _, anchor = link.partition("#")
    path = (ROOT / page).parent / target if target else ROOT / page
    if not (anchor and path.is_file()):
        return path.is_file()
    return anchor in map(slug, re.findall(r"^#+ (.*)$", prose(path.read_text(encoding="utf-8")), re.MULTILINE))


def test_a_link_to_nothing_does_not_resolve() -> None:
    assert resolves("docs/ci.md", "README.md") and resolves("#exit-codes", "docs/ci.md")
    assert not any(resolves(link, "docs/ci.md") for link in ("no.md", "#nothing", "cases.md#nothing"))


def test_every_page_is_linked_from_another() -> None:
    linked = {((ROOT / page).parent / link.partition("#")[0]).resolve() for page in ALL for link in links(page)}
    assert [page for page in ALL if page != "README.md" and (ROOT / page).resolve() not in linked] == []


PATH = r"`([\w.]+/(?:[\w.-]+/)*(?:[\w-]+\.\w+)?)`"
PYTHON_FILE = r"`(?!(?:my.*|mine|vacuous|FILE|wrong)\.py)([\w-]+\.py)`"  # but for those that are invented


def test_every_path_that_a_page_names_exists() -> None:
    rooms = [path.name for path in (ROOT / "normcheck").iterdir() if path.is_dir()]
    bases = ROOT, ROOT / "normcheck"
    named = [(page, path) for page in ALL for path in re.findall(PATH, ALL[page]) if "NAME" not in path]
    of_this_tree = [(page, path) for page, path in named if is_folder(path.partition("/")[0], rooms)]
    assert [(page, path) for page, path in of_this_tree if not any((base / path).exists() for base in bases)] == []
    files = {path.name for folder in ("normcheck", "tests") for path in (ROOT / folder).rglob("*.py")}
    assert {(page, file) for page in ALL for file in re.findall(PYTHON_FILE, ALL[page]) if file not in files} == set()


def is_folder(name: str, rooms: list[str]) -> bool:
    return (ROOT / name).is_dir() or name in rooms


def test_pages_name_paths_files_and_options() -> None:
    """What the tests of each page look for is there to be found."""
    text = "".join(ALL.values())
    assert len(re.findall(PATH, text)) > 100 and len(re.findall(PYTHON_FILE, text)) > 10
    assert len(re.findall(r"`--[a-z]", text)) > 60 and len(re.findall("normcheck verify ", text)) > 30


def test_the_budgets_of_the_profiles_are_as_written() -> None:
    text = PAGES["docs/ci.md"]
    for name, profile in PROFILES.items():
        row = f"| `{name}` | {profile.core_seconds:g} s | {profile.seconds:g} s | {profile.max_examples} |"
        assert row in text
        assert f"{profile.shrink_seconds:g} s at most" in text
    quick, ci = PROFILES["quick"], PROFILES["ci"]
    cases = " ".join(PAGES["docs/cases.md"].split())
    assert f"({quick.core_seconds:g} s a cell in quick, {ci.core_seconds:g} in ci" in cases


def test_every_recipe_that_the_audit_page_names_exists() -> None:
    named = re.search(r"tolerance, one of\s+(.*?), or\s+yours", PAGES["docs/audit.md"], re.DOTALL)
    assert named
    assert re.findall(r"`([a-z-]+)`", named[1]) == list(RECIPES)


def test_every_kind_of_finding_is_explained() -> None:
    page = PAGES["docs/what-no-comparison-sees.md"]
    assert {kind for kind in KINDS if f"[`{kind}`](../normcheck/findings/{kind}.md)" in page} == set(KINDS)


def test_every_kind_of_data_and_every_layout_is_explained() -> None:
    page = PAGES["docs/cases.md"]
    named = {word for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    assert {*ROW_KINDS, *DY_KINDS, *WEIGHT_KINDS, *LAYOUTS} <= named


def test_every_field_of_an_implementation_is_explained_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (None|True|False|`.*?`) \| ", PAGES["docs/kernel-contract.md"], re.MULTILINE)
    defaults = {
        field.name: repr(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
        for field in dataclasses.fields(Implementation)
    }
    assert list(dict(rows)) == [name for name in defaults if name not in ("name", "op", "forward")]
    for name, said in rows:
        assert said.strip("`").replace('"', "'") == defaults[name], name


def test_the_tables_of_bench_were_made_by_the_commands_beside_them() -> None:
    page = PAGES["docs/bench.md"].replace("\\\n", "")
    for suite in ("pytorch-layernorm-backward", "triton-tutorial"):
        made = json.loads((ROOT / "golden" / "bench" / f"{suite}.json").read_text(encoding="utf-8"))
        assert f"normcheck {shlex.join(made['argv'])}" in re.sub(" +", " ", page)
