"""[tool.normcheck]: found, overridden, refused in one line that names the file, the key and the nearest right one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normcheck.errors import UsageError
from normcheck.gate.config import KEYS, LARGEST_BYTES, blamed, load, settings
from normcheck.gate.options import VerifyOptions, profiles
from normcheck.gate.plan import PROFILES
from normcheck.options import built


def project(folder: Path, *lines: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text("\n".join(("[tool.normcheck]", *lines, "")), encoding="utf-8")
    return path


EVERYTHING = """
impl = ["kernels/mine.py", "kernels/mine.py:fused", "torch", "package.module:f"]
op = "rmsnorm"
dtype = ["fp16", "bf16"]
profile = "ci"
max_examples = 20
layout = "heads"
time_budget = 3
seed = 7
device = "cpu"
timeout = 9.5
judge = "plain"
workers = 2
isolation = true
sandbox = false
context = ["thread", "again"]
contexts = true
require_context = ["again"]
configs = "all"
require = ["mine"]
allow_thin = true
known_failures = "known.txt"
baseline = "baseline.json"
drift_ratio = 3
drift_ulp = 2.5
database = ".normcheck"
timings = "out/last.json"
report = ["json:out/report.json", "terminal:-"]
"""


def test_every_key_and_paths_from_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, EVERYTHING)
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    values = settings({}, None)
    assert set(values) == {*KEYS, "part", "config", "from_config"}
    assert values["impl"] == ("../../kernels/mine.py", "../../kernels/mine.py:fused", "torch", "package.module:f")
    assert values["op"] == ("rmsnorm",)
    assert values["known_failures"] == "../../known.txt"
    assert values["timings"] == "../../out/last.json"
    assert values["report"] == ("json:../../out/report.json", "terminal:-")
    assert (values["seed"], values["timeout"], values["part"]) == ("7", 9.5, False)
    assert values["allow_thin"] is True


def test_paths_from_the_folder_that_has_a_link_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "pyproject.toml").symlink_to(project(tmp_path / "store", 'impl = "mine.py"'))
    (impl,) = settings({}, str(tmp_path / "pyproject.toml"))["impl"]
    assert os.path.realpath(impl) == str((tmp_path / "mine.py").resolve())


def test_the_command_line_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, EVERYTHING)
    monkeypatch.chdir(tmp_path)
    values = settings({"dtype": ["fp32"], "workers": 1, "isolation": False, "profile": None}, None)
    assert (values["dtype"], values["workers"], values["isolation"], values["profile"]) == (["fp32"], 1, False, "ci")
    assert values["part"]
    assert values["require"] == ("mine",)
    assert "require" in values["from_config"]
    assert settings({"impl": ["triton"], "require": ["triton"]}, None)["require"] == ["triton"]


def test_a_part_of_the_gate(tmp_path: Path) -> None:
    """Where the file says no dtype, --dtype narrows what it is about all the same."""
    path = str(project(tmp_path, 'known_failures = "known.txt"'))
    assert settings({"dtype": ["fp16"]}, path)["part"]
    assert not settings({"dtype": ["fp16"], "known_failures": "other.txt"}, path)["part"]
    assert not settings({"impl": ["torch"]}, path)["part"]
    assert settings({"impl": ["torch"]}, str(project(tmp_path, 'impl = "triton"')))["part"]
    path = str(project(tmp_path, 'known_failures = "known.txt"'))
    assert not settings({"profile": "ci"}, path)["part"]


def test_a_complaint_names_the_file_that_said_it(tmp_path: Path) -> None:
    path = project(tmp_path, "workers = 0")
    for given, expected in (
        ({}, f"{os.path.relpath(path)}: [tool.normcheck] workers=0: expected an"),
        ({"workers": 0}, "workers=0: "),
    ):
        with pytest.raises(UsageError) as raised, blamed(settings(given, str(path))):
            built(VerifyOptions, settings(given, str(path)))
        assert str(raised.value).startswith(expected)


def test_a_mark_of_the_byte_order_is_no_content(tmp_path: Path) -> None:
    path = project(tmp_path, "seed = 1")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert settings({}, str(path))["seed"] == "1"


def test_options_of_settings(tmp_path: Path) -> None:
    path = project(tmp_path, 'impl = "torch"', "seed = 7", "max_examples = 3")
    options = built(VerifyOptions, settings({"dtype": ["fp32"]}, str(path)))
    said = {"config": str(path), "from_config": ("impl", "seed", "max_examples")}
    assert options == VerifyOptions(impl=("torch",), dtype=("fp32",), seed=7, max_examples=3, **said)
    assert built(VerifyOptions, {}) == VerifyOptions()


def test_the_nearest_file_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, "seed = 1")
    inner = tmp_path / "package"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    monkeypatch.chdir(inner)
    assert settings({}, None)["seed"] == "1"
    project(inner, "seed = 2")
    assert settings({}, None)["seed"] == "2"
    monkeypatch.chdir(tmp_path)
    assert settings({}, None)["seed"] == "1"
    assert settings({}, "package/pyproject.toml")["seed"] == "2"


WRONG = {
    "max-examples = 3": "max-examples=3: no such key; did you mean max_examples?",
    "implementations = 'x'": "implementations='x': no such key; did you mean impl",
    "dtypes = ['fp16']": "dtypes=['fp16']: no such key; did you mean dtype?",
    "zzz = 1": "zzz=1: no such key; expected one of op, impl",
    "max_examples = '3'": "max_examples='3': expected an integer",
    "max_examples = 3.5": "max_examples=3.5: expected an integer",
    "max_examples = true": "max_examples=True: expected an integer",
    "time_budget = 'long'": "time_budget='long': expected a number",
    "timeout = false": "timeout=False: expected a number",
    "isolation = 1": "isolation=1: expected true or false",
    "allow_thin = 'yes'": "allow_thin='yes': expected true or false",
    "profile = ['ci']": "profile=['ci']: expected a string",
    "op = 3": "op=3: expected a string or an array of strings",
    "op = [3]": "op=[3]: expected a string or an array of strings",
    "seed = 'any'": "seed='any': expected an integer, or \"random\"",
    "seed = 1.0": 'seed=1.0: expected an integer, or "random"',
    "seed = 3\nseed = 4": "expected TOML: ",
    "seed = [": "expected TOML: ",
    "impl = 'x": "expected TOML: ",
    f"seed = {'9' * 5000}": "expected TOML: ",
    f"op = {'[' * 100_000}": "expected TOML: ",
    'profile = """\x1b"""': "expected TOML: ",
    '"\\u001b[31m" = 1': r"\x1b[31m=1: no such key",
}


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[:20])
def test_wrong_files_are_one_line(tmp_path: Path, content: str) -> None:
    path = project(tmp_path, content)
    with pytest.raises(UsageError) as raised:
        settings({}, str(path))
    message = str(raised.value)
    assert "pyproject.toml: " in message
    assert WRONG[content] in message
    assert message.isprintable()
    assert len(message) < 700


def test_files_that_are_none(tmp_path: Path) -> None:
    plain = tmp_path / "plain.toml"
    plain.write_text("[tool]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"plain\.toml: expected a table \[tool\.normcheck\]"):
        load(plain)
    plain.write_text("[tool]\nnormcheck = 3\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"tool\.normcheck=3: expected a table"):
        load(plain)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="expected TOML in UTF-8"):
        load(plain)
    plain.write_bytes(b"#" * (LARGEST_BYTES + 1))
    with pytest.raises(UsageError, match="expected at most"):
        load(plain)
    for missing in ("missing.toml", "a" * 300, "nul\0", str(tmp_path)):
        with pytest.raises(UsageError, match="no such file"):
            settings({}, missing)


def test_the_profiles_that_are_named_are_those_that_there_are() -> None:
    assert tuple(profiles()) == tuple(PROFILES)


def seed_of(text: str) -> int:
    return built(VerifyOptions, {"seed": text}).seed


def test_seeds() -> None:
    assert seed_of("-3") == -3
    drawn = {seed_of("random") for _ in range(8)}
    assert len(drawn) > 1
    for wrong in ("half", "1e3", "", "1_0", "9" * 1001, "\x1b"):
        with pytest.raises(UsageError, match="expected an integer"):
            seed_of(wrong)
