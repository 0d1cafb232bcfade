"""``verify --kernelbench``: what a problem computes is found by judging it, and its answer is judged as that."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli, Done
from tests.inner_loop import parametrize
from tests.loaders.samples import LN_PROBLEM, RMS_PROBLEM, answer, problem

RMS = "return x * torch.rsqrt((x * x).mean(1, keepdim=True) + {})"
LN = "return torch.nn.functional.layer_norm(x, {}, {}, 1e-5)"
OWN = "self.g, self.shift = (torch.nn.Parameter(f(size)) for f in (torch.ones, torch.zeros))"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of loaders are made here, not in the machine's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(cli: Cli, folder: Path, asked: str, answered: str, *more: str) -> Done:
    for name, text in (("problem.py", asked), ("answer.py", answered)):
        (folder / name).write_text(text, encoding="utf-8")
    few = ("--device", "cpu", "--max-examples", "14", "--allow-thin", "--no-contexts", *more)
    return cli("verify", "--kernelbench", str(folder / "problem.py"), str(folder / "answer.py"), *few)


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
@pytest.mark.parametrize(("eps", "code"), [("self.eps", ExitCode.PASS), ("1e-5", ExitCode.FOUND)])
def test_rmsnorm_over_dimension_1_without_a_weight(cli: Cli, tmp_path: Path, eps: str, code: ExitCode) -> None:
    done = run(cli, tmp_path, RMS_PROBLEM, answer(RMS.format(eps)))
    assert done.code == code, done.out + done.err
    assert "rmsnorm answer.py:ModelNew fp32" in done.out
    if code == ExitCode.FOUND:
        assert "eps=0.0001" in done.out and "weights=none" in done.out
    else:
        assert "shapes asked for: 2 of 2 judged" in " ".join(done.out.split())


@pytest.mark.slow
@pytest.mark.parametrize("most", ["1", "2", "14"])
def test_no_more_cases_run_than_are_allowed_of_which_half_are_for_its_shapes(
    cli: Cli, tmp_path: Path, most: str
) -> None:
    """The later option counts."""
    done = run(cli, tmp_path, RMS_PROBLEM, answer(RMS.format("self.eps")), "--max-examples", most)
    said = " ".join(done.out.split())
    assert done.code == ExitCode.PASS and f", {most} case{'s' * (most != '1')} on " in done.last, done.out
    judged = {"1": 0, "2": 1, "14": 2}[most]
    assert f"shapes asked for: {judged} of 2 judged" in said
    assert ("no case is left for it: raise --max-examples" in said) == (judged < 2)


@pytest.mark.slow
@parametrize(
    ("forward", "body", "code", "said"),
    [
        (LN.format("self.g.shape", "self.g, self.shift"), OWN, ExitCode.PASS, "shapes asked for: 2 of 2 judged"),
        (LN.format("self.size", "None, None"), "pass", ExitCode.FOUND, "has no parameter for norm.weight"),
        (LN.format("self.size", "self.shift, self.g"), OWN, ExitCode.FOUND, "y is wrong"),
        (LN.format("self.size[1:]", "self.g[0], self.shift[0]"), OWN, ExitCode.FOUND, "y is wrong"),
        ("return x.flatten(1)", OWN, ExitCode.FOUND, "y.shape="),
    ],
    inner=1,
)
@pytest.mark.usefixtures("unshrunk")
def test_layernorm_over_three_dimensions_with_random_weights(
    cli: Cli, tmp_path: Path, forward: str, body: str, code: ExitCode, said: str
) -> None:
    """An answer that takes its weights for ones is right in the problem's own test."""
    done = run(cli, tmp_path, LN_PROBLEM, answer(forward, body))
    assert done.code == code, done.out + done.err
    assert said in " ".join(done.out.split())
    assert "layernorm answer.py:ModelNew fp32" in done.out


@pytest.mark.slow
def test_the_lines_to_paste_name_the_two_files_of_the_user(cli: Cli, tmp_path: Path) -> None:
    """They are run as they are, the first in a new process, after the folder of the loader has gone."""
    done = run(cli, tmp_path, RMS_PROBLEM, answer(RMS.format("1e-5")))
    assert done.code == ExitCode.FOUND and not list(tmp_path.glob("normcheck-loaded-*"))
    lines = dict(re.findall(r"^(Explain|Reproduce): normcheck (.*)$", done.out, re.MULTILINE))
    assert lines["Reproduce"].startswith(f"repro --kernelbench {tmp_path / 'problem.py'} {tmp_path / 'answer.py'} ")
    assert "normcheck-loaded" not in done.out
    command = [sys.executable, "-m", "normcheck", *shlex.split(lines["Reproduce"])]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == ExitCode.FOUND, again.stderr
    failure = re.compile(
        r"^FAIL rmsnorm answer.py:ModelNew fp32: y is wrong.*?\nReproduce: [^\n]*$", re.MULTILINE | re.DOTALL
    )
    shown = [re.sub(r"\n  Larger case[^\n]*", "", failure.findall(text)[0]) for text in (done.out, again.stdout)]
    assert shown[0] == shown[1]
    (allowed,) = re.findall(r"  bound     (\S+) =", shown[0])
    found = cli(*shlex.split(lines["Explain"])).out.partition("\nend to end\n")[2]
    assert f"{float(re.findall(r'bound     ([^ ,]+)', found)[0]):.1e}" == allowed


@pytest.mark.slow
def test_a_failure_of_many_calls_is_reproduced_by_the_two_files(cli: Cli, tmp_path: Path) -> None:
    late = "ModelNew.calls = getattr(ModelNew, 'calls', 0) + 1\n        "
    done = run(cli, tmp_path, RMS_PROBLEM, answer(late + RMS.format("self.eps") + " * (1 + (self.calls > 20))"))
    (line,) = re.findall(r"^Reproduce: normcheck ((?:verify|repro) --kernelbench .*)$", done.out, re.MULTILINE)
    assert done.code == ExitCode.FOUND and "normcheck-loaded" not in done.out
    assert cli(*shlex.split(line)).code == ExitCode.FOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("layernorm fp32 M=1 N=7",), "op=layernorm: expected one of rmsnorm, which are what kernelbench="),
        (("rmsnorm fp32 M=1 N=7", "--pdb"), "pdb: expected none"),
        (("rmsnorm fp32 M=1 N=7", "--no-isolation"), "isolation: expected no --no-isolation"),
        (("rmsnorm fp32 M=1 N=7", "--solution", "s.json"), "kernelbench: expected no --solution"),
    ],
)
def test_what_repro_cannot_do_with_an_answer(cli: Cli, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    files = {"problem.py": RMS_PROBLEM, "answer.py": answer(RMS.format("self.eps"))}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = cli("repro", "--kernelbench", *(str(tmp_path / name) for name in files), *more)
    assert (done.code, done.out) == (ExitCode.USAGE, "") and said in done.err and "normcheck-loaded" not in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_an_answer_may_refuse_other_shapes_but_not_its_own(cli: Cli, tmp_path: Path) -> None:
    only = "assert x.shape[1:] == (4, 5, 8)\n        "
    done = run(cli, tmp_path, LN_PROBLEM, answer(only + LN.format("self.size", "self.g, self.shift"), OWN))
    assert done.code == ExitCode.PASS, done.out + done.err
    assert "2 of 2 judged" in done.out
    never = "assert len(x) == 7\n        "
    done = run(cli, tmp_path, LN_PROBLEM, answer(never + LN.format("self.size", "self.g, self.shift"), OWN))
    assert done.code == ExitCode.FOUND and "AssertionError" in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_an_answer_that_is_wrong_at_the_given_shape_alone(cli: Cli, tmp_path: Path) -> None:
    wrong = "\n        return y * 1.01 if x.shape == (6, 4, 5, 8) else y"
    forward = LN.format("self.size", "self.g, self.shift").replace("return", "y =") + wrong
    done = run(cli, tmp_path, LN_PROBLEM, answer(forward, OWN))
    assert done.code == ExitCode.FOUND and "M=6 N=160" in done.out


INSTANCE = problem("return self.norm(x)", (3, 5, 6, 7), "5", "self.norm = nn.InstanceNorm2d(size)")
BEHIND = problem("return x / (x.norm(dim=1, keepdim=True) + self.eps)", (4, 24), "24")


@pytest.mark.slow
def test_what_a_problem_computes_is_not_read_from_its_name(cli: Cli, tmp_path: Path) -> None:
    """InstanceNorm is a layernorm over the last two dimensions."""
    body = "return (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()"
    done = run(cli, tmp_path, INSTANCE, answer(body))
    assert done.code == ExitCode.PASS, done.out + done.err
    assert "layernorm answer.py:ModelNew fp32" in done.out


GROUPS = "return torch.nn.functional.group_norm(x, {}, self.g, self.shift, {})"
GROUPED = {
    "a module": problem("return self.norm(x)", (3, 12, 6, 7), "12", "self.norm = nn.GroupNorm(4, size)"),
    "one a channel": problem(
        "return self.norm(x)", (3, 12, 6, 7), "12", "self.norm = nn.InstanceNorm2d(12, affine=True)"
    ),
    "an argument": problem(GROUPS.format("int(self.eps)", 1e-3), (3, 12, 31), "12, 6", OWN),
}


@pytest.mark.slow
@parametrize(
    ("asked", "groups", "eps", "code"),
    [
        ("a module", "4", 1e-5, ExitCode.PASS),
        ("an argument", "6", 1e-3, ExitCode.PASS),
        ("one a channel", "12", 1e-5, ExitCode.PASS),
        ("a module", "4", 1e-6, ExitCode.FOUND),
        ("a module", "3", 1e-5, ExitCode.FOUND),
        ("a module", "4 if x.shape[0] > 1 else 1", 1e-5, ExitCode.FOUND),
    ],
    inner=1,
)
@pytest.mark.usefixtures("unshrunk")
def test_groups_of_channels(cli: Cli, tmp_path: Path, asked: str, groups: str, eps: float, code: ExitCode) -> None:
    """Weights are random here, of a channel each, though the problem has ones."""
    done = run(cli, tmp_path, GROUPED[asked], answer(GROUPS.format(groups, eps), OWN))
    assert done.code == code, done.out + done.err
    assert "groupnorm answer.py:ModelNew fp32" in done.out
    assert "shapes asked for: 2 of 2 judged" in " ".join(done.out.split()) or code == ExitCode.FOUND


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_an_answer_that_takes_the_weights_of_a_groupnorm_for_ones(cli: Cli, tmp_path: Path) -> None:
    done = run(cli, tmp_path, GROUPED["a module"], answer("return torch.nn.functional.group_norm(x, 4)", OWN))
    assert done.code == ExitCode.FOUND and "y is wrong" in done.out


LENGTHS = {
    "without an eps": "x / torch.norm(x, p=2, dim=1, keepdim=True)",
    "of torch": "torch.nn.functional.normalize(x, dim=1)",
    "sum": "x * torch.rsqrt((x * x).sum(1, keepdim=True) + 1e-4)",
    "max": "x / torch.norm(x, p=2, dim=1, keepdim=True).clamp(min=1e-4)",
}


@pytest.mark.slow
@parametrize(
    ("asked", "answered", "code"),
    [
        ("without an eps", "without an eps", ExitCode.PASS),
        ("of torch", "of torch", ExitCode.PASS),
        ("sum", "sum", ExitCode.PASS),
        ("sum", "max", ExitCode.FOUND),
        ("max", "sum", ExitCode.FOUND),
    ],
    inner=1,
)
@pytest.mark.usefixtures("unshrunk")
def test_a_norm_by_length_keeps_to_what_the_eps_of_its_problem_does(
    cli: Cli, tmp_path: Path, asked: str, answered: str, code: ExitCode
) -> None:
    """The first is KernelBench's L2Norm."""
    done = run(cli, tmp_path, problem(f"return {LENGTHS[asked]}", (4, 24), "24"), answer(f"return {LENGTHS[answered]}"))
    assert done.code == code, done.out + done.err
    assert "l2norm answer.py:ModelNew fp32" in done.out


@parametrize(
    ("asked", "answered", "said"),
    [
        (BEHIND, answer("return x"), "expected a Model that is rmsnorm, layernorm, l2norm or groupnorm over 1"),
        ("x = 1\n", answer("return x"), "no Model in it: expected a problem with Model"),
        ("import no_such_library\n", answer("return x"), "no_such_library"),
        ("def (", answer("return x"), "expected a Python file"),
        (RMS_PROBLEM.replace("torch.rand(", "2 * [torch.rand(1)] + list("), answer("return x"), "expected one tensor"),
        (RMS_PROBLEM, "x = 1\n", "expected a class ModelNew"),
    ],
    inner=3,
)
def test_a_file_that_is_none_is_told_in_one_line(
    cli: Cli, tmp_path: Path, asked: str, answered: str, said: str
) -> None:
    done = run(cli, tmp_path, asked, answered)
    assert (done.code, done.out) == (ExitCode.USAGE, ""), done.out + done.err
    assert said in done.err and done.err.count("\n") == 1 and "normcheck-loaded" not in done.err
