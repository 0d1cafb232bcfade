"""The commands and examples of README.md and docs/ are run: what a page shows is what happens."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

from tests.command_line import Cli, Done
from tests.project.pages import BLOCKS, COMMANDS, PAGES

GATES = tuple(re.findall(r"^- run: (normcheck .*)$", "".join(PAGES.values()), re.MULTILINE))
REPRODUCE = re.compile(r"^FAIL [^\n]*: (\w+) is wrong \(([^\n]*)\)$.*?^Reproduce: ([^\n]*)$", re.MULTILINE | re.DOTALL)
REDS = {page: REPRODUCE.findall(text) for page, text in PAGES.items() if REPRODUCE.search(text)}
FAILS = {
    "my_rmsnorm.py": "rmsnorm my_rmsnorm.py:rmsnorm fp16, bf16, fp32: y is wrong (end to end)",
    "my_layernorm.py": "layernorm mine fp16: rstd is wrong (end to end)",
    "my_frozen.py": "rmsnorm my_frozen.py:rmsnorm fp32: dx is wrong in another context (frozen)",
    "my_promise.py": "rmsnorm mine fp32: something is wrong in another context (again)",
}
NEED_A_GPU = ("my_cuda.py", "my_cupy.py", "my_numba.py", "my_helion.py")
FEWER = ("--max-examples", "25", "--allow-thin", "--no-contexts")
"""A kernel that a page has to show how one is written: a few cases tell that it is one, and computes its op."""
CORE = ("--time-budget", "0.1", "--no-contexts")
"""Of a page that shows how a run passes: the whole core, a small one."""
ENOUGH = ("--time-budget", "30", "--max-examples", "12")
"""To shrink what fails to its simplest case, on a busy machine as well: it ends before. Contexts follow few cases."""


def _examples() -> tuple[dict[str, str], dict[str, str]]:
    """File name -> source, of all pages: as it should be, and with the typo that a diff puts in or takes out."""
    text = "".join(PAGES.values())
    named = re.findall(r"^```python\n# (\S+\.py)(, with a typo)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(named) == len({name for name, *_ in named}), "a file stands in one page, the others link to it"
    right = {name: source for name, _, source in named}
    wrong = dict(right)
    for old, new in re.findall(r"^```diff\n-(.*)\n\+(.*)\n```$", text, re.MULTILINE):
        ((name, typo, source),) = [entry for entry in named if entry[2].count(old) == 1]
        (right if typo else wrong)[name] = source.replace(old, new)
    return right, wrong


RIGHT, WRONG = _examples()


def run(cli: Callable[..., Done], command: str) -> Done:
    """Run a ``normcheck ...`` line of a page on the CPU; a verify with fewer cases than it says, in as much time."""
    name, *arguments = shlex.split(command, comments=True)
    assert name == "normcheck"
    if arguments[0] == "verify":
        passes = any("\nPASS  " in f"\n{block}" for block in shown(command))
        arguments += ENOUGH if "exit code 1" in command else CORE if passes else FEWER
    return cli(*arguments, *(("--device", "cpu") if arguments[0] not in ("export-case", "skill") else ()))


def write(folder: Path, examples: dict[str, str]) -> None:
    """Put the pages' example files into ``folder``."""
    for name, source in examples.items():
        (folder / name).write_text(source, encoding="utf-8")


def replaced(name: str, old: str, new: str) -> dict[str, str]:
    """The examples with another text in the one of this name."""
    assert RIGHT[name].count(old) == 1, f"the documentation's {name} no longer says {old!r}"
    return {**RIGHT, name: RIGHT[name].replace(old, new)}


def without_cpp() -> dict[str, str]:
    """The example of torch.compile with all of it but C++, which takes half a minute of a core."""
    return replaced("my_compiled.py", "dynamic=True", 'dynamic=True, backend="aot_eager"')


def shown(command: str) -> list[str]:
    """What the pages that have ``command`` show right after it."""
    after = re.compile(re.escape(f"```sh\n{command}\n```\n") + r"[^`]*```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for text in PAGES.values() for block in after.findall(text)]


def four_digits(text: str) -> str:
    """Another version of torch may round the last digits of an fp64 otherwise."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.4g}", text)


def test_the_examples_are_found() -> None:
    assert set(RIGHT) == {
        "vacuous.py",
        "my_rmsnorm.py",
        "my_layernorm.py",
        "my_norm.py",
        "my_add.py",
        "my_gate.py",
        "my_modulate.py",
        "my_gated_add.py",
        "my_groupnorm.py",
        "my_rope.py",
        "my_l2norm.py",
        "my_quant.py",
        "my_frozen.py",
        "my_promise.py",
        "my_compiled.py",
        "test_my_norm.py",  # tests/bounds runs it
        "test_my_kernels.py",  # tests/test_pytest_plugin.py runs it
        *NEED_A_GPU,
    }
    assert {name for name in RIGHT if RIGHT[name] != WRONG[name]} == set(FAILS)
    assert len(COMMANDS) >= 9
    for text in PAGES.values():
        for block in re.findall(r"^```python\n(?!# \S+\.py)(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert any(block in source for source in RIGHT.values()), block


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_a_kernel_in_another_language_is_python_with_the_function_that_its_command_names(name: str) -> None:
    """``pytest -m gpu tests/project/test_readme.py -n 0`` runs those that can be imported on a GPU."""
    functions = [node.name for node in ast.parse(RIGHT[name]).body if isinstance(node, ast.FunctionDef)]
    assert functions[-1] == "rmsnorm"
    assert any(f"normcheck verify --impl {name}:rmsnorm --op rmsnorm" in block for _, _, block in BLOCKS)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
@pytest.mark.parametrize("name", NEED_A_GPU)
def test_a_kernel_in_another_language_is_right_on_a_gpu(name: str, cli: Cli, tmp_path: Path) -> None:
    package = name.removeprefix("my_").removesuffix(".py")
    there = which("nvcc") and which("ninja") if package == "cuda" else find_spec(package)
    if not there:
        pytest.skip("needs nvcc and ninja" if package == "cuda" else f"needs {package}")
    write(tmp_path, {name: RIGHT[name]})
    for n in (33, 1024, 5000):
        case = f"rmsnorm fp16 M=40 N={n} eps=1e-05 rows=blend dy=normal layout=contiguous seed=3 bias=none"
        done = cli("repro", f"{name}:rmsnorm", "--timeout", "500", "--device", "cuda", case)
        assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_a_dx_of_zeros_passes_the_check_that_the_audit_page_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    exec(RIGHT["vacuous.py"], {})
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("dx = 0 passes: the largest |dx| is ")
    assert float(said.out.split()[-1]) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_randn_does_not_show_the_typo_of_the_readme(dtype: torch.dtype) -> None:
    space: dict[str, Any] = {}
    exec(WRONG["my_rmsnorm.py"], space)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((512, 768), (768,)))
    expected = torch.nn.functional.rms_norm(x, (768,), weight, 1e-6)
    torch.testing.assert_close(space["rmsnorm"](x, weight, None, 1e-6), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
@pytest.mark.parametrize("command", COMMANDS, ids=COMMANDS)
def test_a_command_does_what_it_says(command: str, cli: Cli, tmp_path: Path) -> None:
    fails = "exit code 1" in command
    name = command.split()[1]
    write(tmp_path, WRONG if fails else without_cpp())
    done = run(cli, command)
    assert done.code == fails, done.out + done.err
    if name in ("verify", "repro", "audit"):
        assert done.out.splitlines()[-1].startswith("FAIL" if fails else ("PASS", "THIN"))
    for block in shown(command):
        if name == "verify":  # its seconds, and what a second of shrinking ends at, are another machine's
            for line in re.findall(r"^FAIL .* is wrong .*$|^PASS  .*, 0 failed", block, re.MULTILINE):
                assert line in done.out
        elif name == "compare":  # bits are another machine's
            for line in re.findall(r"^(?:A |B |differ).*$", block, re.MULTILINE):
                assert re.sub(r"[\d.]+", "#", line) in re.sub(r"[\d.]+", "#", done.out)
        else:
            assert four_digits(block) in four_digits(done.out)
    if name == "verify" and fails:
        (red,) = [words for file, words in FAILS.items() if file in command]
        assert f"FAIL {red}" in done.out
        told = done.out.count("\nReproduce: "), done.out.count("\n  Also in ")
        assert told == ((1, 0) if "--dtype" in command else (1, 2))  # the same finding in three dtypes


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
@pytest.mark.parametrize(("examples", "code"), [(RIGHT, 0), (WRONG, 1)], ids=["right", "wrong"])
def test_the_gate_of_the_readme_is_one_for_its_function(
    examples: dict[str, str], code: int, cli: Cli, tmp_path: Path
) -> None:
    (config,) = re.findall(r"^```toml\n(.*?)^```$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    write(tmp_path, {**examples, "pyproject.toml": config.replace('"ci"', '"quick"')})
    # Few cases of one dtype: the README's own commands judge the same function in the same profile in all of them.
    done = cli("verify", *FEWER, "--device", "cpu", "--dtype", "fp16")
    assert done.code == code, done.out + done.err
    assert "rmsnorm my_rmsnorm.py:rmsnorm fp16" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("page", REDS)
def test_the_red_block_reproduces(page: str, cli: Cli, tmp_path: Path) -> None:
    ((output, check, command),) = REDS[page]
    write(tmp_path, WRONG)
    done = run(cli, command)
    assert done.code == 1, done.out + done.err
    assert re.search(rf"^FAIL +{output} +{check} ", done.out, re.MULTILINE), done.out


def test_the_readme_and_reading_reports_have_a_red_block() -> None:
    assert set(REDS) == {"README.md", "docs/reading-reports.md"}


@pytest.mark.slow
def test_the_gate_writes_the_report_that_its_page_describes(cli: Cli, tmp_path: Path) -> None:
    (command,) = GATES
    write(tmp_path, WRONG)
    done = run(cli, f"{command} --dtype fp16")
    assert done.code == 1, done.out + done.err
    report = json.loads((tmp_path / "normcheck.json").read_text(encoding="utf-8"))
    verdict = next(v for v in report["verdicts"] if v["status"] == "fail")
    outermost = {**report, **verdict, **verdict["core"], **verdict["next"]}
    innermost = {**verdict["failure"], **next(iter(verdict["worst"].values()))}
    words = set(re.findall(r"`([a-z_]+)`", PAGES["docs/json-schema.md"]))
    assert len(words) >= 12
    assert words <= {*outermost, *innermost}
    assert f"`{report['schema']}`" in PAGES["docs/json-schema.md"]


@pytest.mark.slow
def test_eps_outside_the_root_is_found(cli: Cli, tmp_path: Path) -> None:
    """In LayerNorm; the README's own typo is the same in RMSNorm, and its command runs above."""
    write(tmp_path, replaced("my_layernorm.py", "torch.rsqrt(var + eps)", "1 / (var.sqrt() + eps)"))
    done = run(cli, "normcheck verify --impl my_layernorm.py --dtype fp16")
    assert done.code == 1, done.out + done.err
    assert "FAIL layernorm mine fp16: rstd is wrong" in done.out
    assert done.out.count("Might be: eps is added outside the root") == 1
