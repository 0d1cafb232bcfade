"""``verify --solution --definition``: what is recognised, what is judged, what the trace says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli, Done
from tests.inner_loop import parametrize
from tests.loaders.samples import (
    added_definition,
    rmsnorm_definition,
    solution,
    tensor,
    workload,
    written,
)

FEW = ("--device", "cpu", "--max-examples", "14", "--allow-thin", "--no-contexts")
RIGHT = "def kernel(x, w, out):\n    out.copy_(normed(x, w, 1e-5))\n"
WORKLOADS = [
    workload("a", tokens=7),
    {"definition": "rms_h96", "workload": workload("b", tokens=40), "solution": None, "evaluation": None},
]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of loaders are made here, not in the machine's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(
    cli: Cli, folder: Path, code: str, more: tuple[str, ...] = (), **documents: Any
) -> tuple[Done, list[dict[str, Any]]]:
    """What the command said, and the evaluation of each workload, of a solution for 96 columns in bf16."""
    given = {"definition": rmsnorm_definition(), "solution": solution(code), "workload": WORKLOADS, **documents}
    trace = folder / "trace.jsonl"
    done = cli("verify", *written(folder, **given), "--trace", str(trace), *FEW, *more)
    lines = [json.loads(line) for line in trace.read_text().splitlines()] if trace.exists() else []
    return done, [line["evaluation"] for line in lines]


@pytest.mark.slow
def test_a_right_solution_passes_at_the_shapes_of_its_workloads(cli: Cli, tmp_path: Path) -> None:
    done, found = run(cli, tmp_path, RIGHT)
    assert done.code == ExitCode.PASS, done.out + done.err
    assert "rmsnorm ours bf16" in done.out and "shapes asked for: 2 of 2 judged" in " ".join(done.out.split())
    assert [one["status"] for one in found] == ["PASSED", "PASSED"]
    for one in found:
        told = one["correctness"]
        assert 0 < told["max_absolute_error"] < 1e300 and 0.9 < told["extra"]["normcheck"]["worst_ratio"] <= 1
        assert one["performance"]["latency_ms"] == 0.0 and one["environment"]["libs"]["torch"]
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [line["workload"]["uuid"] for line in lines] == ["a", "b"]
    assert {(line["definition"], line["solution"]) for line in lines} == {("rms_h96", "ours")}
    assert not list(tmp_path.glob("normcheck-loaded-*"))


@pytest.mark.slow
def test_another_eps_than_that_of_the_reference_is_found_and_reproduced(cli: Cli, tmp_path: Path) -> None:
    code = "def kernel(x, w):\n    return [normed(x, w, 1e-6)]\n"
    done, found = run(cli, tmp_path, code, solution=solution(code, into=False))
    assert done.code == ExitCode.FOUND
    assert {one["status"] for one in found} == {"INCORRECT_NUMERICAL"}
    assert all(one["performance"] is None and one["correctness"]["max_relative_error"] > 1e-2 for one in found)
    line = re.search(
        r"^Reproduce: normcheck (repro --solution .* 'rmsnorm bf16 [^']*eps=1e-05[^']*')$", done.out, re.MULTILINE
    )
    assert line is not None and "--workload" in line[1] and not list(tmp_path.glob("normcheck-loaded-*"))
    again = cli(*shlex.split(line[1]), "--device", "cpu")
    assert again.code == ExitCode.FOUND and again.out.count(line[0]) == 1


@pytest.mark.slow
def test_a_solution_may_be_given_the_dtype_of_its_definition(cli: Cli, tmp_path: Path) -> None:
    """The line that runs a whole sweep again has it."""
    done, _ = run(cli, tmp_path, RIGHT, more=("--dtype", "bf16"))
    assert done.code == ExitCode.PASS, done.out + done.err


@parametrize(
    ("code", "status"),
    [
        ("def kernel(x, w):\n    return normed(x, w, 1e-5)[:, :-1]\n", "INCORRECT_SHAPE"),
        ("def kernel(x, w):\n    return {'output': normed(x, w, 1e-5).float()}\n", "INCORRECT_DTYPE"),
        ("def kernel(x, w):\n    raise ValueError('no')\n", "RUNTIME_ERROR"),
        ("def kernel(x, w):\n    return x, w\n", "RUNTIME_ERROR"),
        ("import no_such_library\n", "COMPILE_ERROR"),
    ],
    inner=1,
)
def test_a_trace_has_their_status(cli: Cli, tmp_path: Path, code: str, status: str) -> None:
    done, found = run(cli, tmp_path, code, solution=solution(code, into=False))
    assert [one["status"] for one in found] == [status, status]
    assert all(one["correctness"] is None and one["performance"] is None and one["log"] for one in found)
    if status == "COMPILE_ERROR":
        assert done.code == ExitCode.USAGE and "no_such_library" in done.err and "normcheck-loaded" not in done.err
    else:
        assert done.code == ExitCode.FOUND


@pytest.mark.slow
def test_a_workload_alone_may_be_wrong(cli: Cli, tmp_path: Path) -> None:
    """Of a size that no sweep draws: it is judged because a workload asks for it."""
    code = "def kernel(x, w, out):\n    out.copy_(normed(x, w, 1e-5))\n    if len(x) == 4000:\n        out[3999] = 0\n"
    asked = [workload("few", tokens=7), workload("many", tokens=4000)]
    done, found = run(cli, tmp_path, code, workload=asked)
    assert [one["status"] for one in found] == ["PASSED", "INCORRECT_NUMERICAL"]
    assert done.code == ExitCode.FOUND and "M=4000" in done.out


@pytest.mark.slow
def test_a_solution_cannot_choose_what_it_claims(cli: Cli, tmp_path: Path) -> None:
    """It declares, in its own process, that its sums are in half precision and that it takes one shape: no one asks."""
    code = """
from normcheck.impls.implementation import Implementation
from normcheck.loaders import entry
def lenient(self, op, forward):
    return Implementation(name=self.name, op=op, forward=forward, dtypes=("bf16",), model={"accumulate": "fp16"},
                          supports=lambda case: "no", shapes=((1, 96),))
entry.Entry.declared = lenient
def kernel(x, w, out):
    out.copy_(normed(x.half().float(), w, 1e-3).to(x.dtype))
"""
    done, found = run(cli, tmp_path, code)
    assert done.code == ExitCode.FOUND
    assert [one["status"] for one in found] == ["INCORRECT_NUMERICAL", "INCORRECT_NUMERICAL"]


@pytest.mark.slow
@pytest.mark.parametrize(("summed", "code"), [("x + r", ExitCode.PASS), ("x", ExitCode.FOUND)])
def test_a_residual_three_axes_and_an_eps_that_is_given(cli: Cli, tmp_path: Path, summed: str, code: ExitCode) -> None:
    body = f"def kernel(x, r, g, eps, y, s):\n    s.copy_({summed})\n    y.copy_(normed(x + r, g, eps))\n"
    eps = {"eps": {"type": "scalar", "value": 1e-3}}
    documents = {
        "definition": added_definition(),
        "solution": solution(body, "add_rms_h64"),
        "workload": [workload("one", eps, batch=2, length=9)],
    }
    done, found = run(cli, tmp_path, body, **documents)
    assert done.code == code, done.out + done.err
    assert "fused_add_rmsnorm ours fp16" in done.out
    assert found[0]["status"] == ("PASSED" if code == ExitCode.PASS else "INCORRECT_NUMERICAL")
    assert ("eps=0.001" in done.out) == (code == ExitCode.FOUND)  # the line of the case


LAYERNORM = """
import torch
def run(x, w, b):
    wide = x.float()
    return torch.nn.functional.layer_norm(wide, x.shape[-1:], w.float(), b.float(), 1e-6).to(x.dtype)
"""
LLAMA = """
import torch
def run(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
"""
POST = """
import torch
def run(x, w):
    return x + torch.nn.functional.rms_norm(x.float(), x.shape[-1:], w.float(), 1e-5).to(x.dtype)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "op"), [(LAYERNORM, "layernorm"), (LLAMA, "rmsnorm_llama")])
def test_what_is_computed_is_read_from_no_name(cli: Cli, tmp_path: Path, reference: str, op: str) -> None:
    """The reference itself is the solution; the name and op_type of its definition say rmsnorm."""
    definition = rmsnorm_definition(reference)
    if op == "layernorm":
        definition["inputs"]["b"] = tensor("hidden")
    own = solution(reference, into=False, entry_point="src/main.py::run")
    done = cli("verify", *written(tmp_path, definition=definition, solution=own), *FEW)
    assert done.code == ExitCode.PASS, done.out + done.err
    assert f"{op} ours bf16" in done.out


ADD_LLAMA = """
import torch
def run(x, r, g, eps):
    s = x + r
    wide = s.float()
    return g * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), s
"""


@pytest.mark.slow
def test_a_sum_whose_xhat_is_rounded_is_an_op_too(cli: Cli, tmp_path: Path) -> None:
    definition = {**added_definition(), "reference": ADD_LLAMA}
    own = solution(ADD_LLAMA, "add_rms_h64", into=False, entry_point="src/main.py::run")
    done = cli("verify", *written(tmp_path, definition=definition, solution=own), *FEW)
    assert done.code == ExitCode.PASS, done.out + done.err
    assert "fused_add_rmsnorm_llama ours fp16" in done.out


@pytest.mark.slow
def test_a_definition_of_another_thing_is_told_in_one_line(cli: Cli, tmp_path: Path) -> None:
    words = written(tmp_path, definition=rmsnorm_definition(POST), solution=solution(RIGHT))
    done = cli("verify", *words, *FEW)
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert "expected a reference that is an op of normcheck within the bounds; the nearest is rmsnorm" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--impl", "torch"), "impl: expected no --impl"),
        (("--no-isolation",), "expected no --no-isolation"),
        (("--dtype", "fp16"), "dtype=fp16: expected bf16, which its definition has"),
        (("--trace", "x.jsonl"), "expected --workload"),
        (("--kernelbench", "a.py", "b.py"), "expected no --solution"),
    ],
)
def test_what_does_not_go_with_a_solution(cli: Cli, tmp_path: Path, more: tuple[str, ...], expected: str) -> None:
    done = cli("verify", *written(tmp_path, definition=rmsnorm_definition(), solution=solution(RIGHT)), *more)
    assert (done.code, done.out) == (ExitCode.USAGE, "") and expected in done.err


GATED = """
def run(hidden, gate, gamma):
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gamma.float()
    return (normed * torch.nn.functional.silu(gate.float())).to(hidden.dtype)
"""
REWRITING = """
def kernel(hidden, residual, gamma, eps):
    both = hidden + residual
    residual.copy_(both)
    hidden.copy_(normed(both, gamma, eps))
"""


def in_a_map(code: str, definition: str) -> dict[str, Any]:
    """A solution whose sources are lines by path, the file of its entry six folders deep."""
    own = solution(code, definition, into=False, entry_point="a/b/c/d/e/f/main.py::kernel")
    (main, parts) = own["sources"]
    texts = {"a/b/c/d/e/f/main.py": main["content"], "a/b/c/d/e/f/parts.py": parts["content"]}
    return {**own, "sources": {path: text.splitlines(keepends=True) for path, text in texts.items()}}


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(("swap", "code"), [(False, ExitCode.PASS), (True, ExitCode.FOUND)])
def test_a_gate_is_told_by_its_name_and_sources_may_be_a_map(
    cli: Cli, tmp_path: Path, swap: bool, code: ExitCode
) -> None:
    x = tensor("tokens", "hidden")
    definition = rmsnorm_definition("import torch\n" + GATED) | {
        "inputs": {"hidden": x, "gate": x, "gamma": tensor("hidden")},
        "outputs": {"y": x},
    }
    kernel = GATED.replace("def run(hidden, gate", f"def kernel({'gate, hidden' if swap else 'hidden, gate'}")
    done, _ = run(cli, tmp_path, "", definition=definition, solution=in_a_map(kernel, "rms_h96"))
    assert done.code == code, done.out + done.err
    assert "rmsnorm_gated ours bf16" in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize("wrong", [False, True])
def test_outputs_may_be_inputs_that_a_call_writes_into(cli: Cli, tmp_path: Path, wrong: bool) -> None:
    definition = added_definition()
    inputs = definition["inputs"]
    definition = definition | {"outputs": {name: inputs[name] for name in ("hidden", "residual")}}
    code = REWRITING.replace("residual.copy_(both)", "residual.copy_(hidden)") if wrong else REWRITING
    lines = [workload("a", {"eps": {"type": "scalar", "value": 1e-6}}, batch=2, length=5)]
    done, _ = run(cli, tmp_path, "", definition=definition, solution=in_a_map(code, "add_rms_h64"), workload=lines)
    assert done.code == (ExitCode.FOUND if wrong else ExitCode.PASS), done.out + done.err
