"""``normcheck kernelbot init``: the folder is what the bot reads, and its check is ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from normcheck.errors import ExitCode
from normcheck.loaders.kernelbot_folder import TENSORS
from tests.command_line import Cli

Kernel = Callable[..., Any]


@pytest.fixture
def bot(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """``bot(op)``: the module ``reference`` of a new problem, as the bot imports it."""

    def made(op: str) -> Any:
        done = cli("kernelbot", "init", op, str(tmp_path / op), "--dtype", "fp16")
        assert done.code == ExitCode.PASS, done.err
        monkeypatch.syspath_prepend(tmp_path / op)
        return importlib.import_module("reference")

    yield made
    for name in ("reference", "task", "template"):
        sys.modules.pop(name, None)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def ln(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


def unbiased(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    variance, mean = torch.var_mean(x.float(), -1, correction=min(1, x.shape[-1] - 1), keepdim=True)
    return ((x.float() - mean) * torch.rsqrt(variance + eps) * weight.float() + bias.float()).to(x.dtype)


RIGHT: dict[str, Kernel] = {
    "rmsnorm": rms,
    "layernorm": ln,
    "fused_add_rmsnorm": lambda x, r, w, eps: (rms(x + r, w, eps), x + r),
}
WRONG: dict[str, Kernel] = {
    "rmsnorm": lambda x, w, eps: rms(x, w, 1e-6),
    "layernorm": unbiased,
    "fused_add_rmsnorm": lambda x, r, w, eps: (rms(x + r, w, eps), x),
}


@pytest.mark.slow
@pytest.mark.parametrize("op", TENSORS)
def test_its_check_tells_right_from_wrong_on_its_own_tests(op: str, bot: Callable[[str], Any], tmp_path: Path) -> None:
    reference = bot(op)
    task = yaml.safe_load((tmp_path / op / "task.yml").read_text(encoding="utf-8"))
    assert {file["name"] for file in task["files"]} >= {"submission.py", "reference.py", "eval.py"}
    found = []
    for spec in task["tests"]:
        data = reference.generate_input(**spec)
        assert data[0].shape == (spec["rows"], spec["columns"]) and data[0].dtype == torch.float16
        assert reference.check_implementation(data, RIGHT[op](*data)) == (True, "")
        found.append(reference.check_implementation(data, WRONG[op](*data)))
    assert any(not right and "wrong in" in why for right, why in found), found
    kept: dict[Any, Any] = {}
    cheats = (
        lambda *data: kept.setdefault(data[0].shape, RIGHT[op](*data)),  # the first answer of each shape
        lambda *data: RIGHT[op](*data[:-1], 1e-5),  # an eps of its own
    )
    for cheat in cheats:
        all_data = [reference.generate_input(**spec) for spec in task["tests"]]
        assert not all(reference.check_implementation(data, cheat(*data))[0] for data in all_data)
    right = RIGHT[op](*data)
    for output in (None, (right, right, right), "y", torch.nn.Parameter(data[0]), data[0][:0]):
        accepted, why = reference.check_implementation(data, output)
        assert not accepted and why.isprintable() and "expected" in why
    template = importlib.import_module("template")
    with pytest.raises(NotImplementedError):
        template.custom_kernel(data)


def test_words_of_a_test_are_those_that_the_bot_can_read(bot: Callable[[str], Any], tmp_path: Path) -> None:
    """It reads letters, or an integer."""
    bot("rmsnorm")
    task = yaml.safe_load((tmp_path / "rmsnorm" / "task.yml").read_text(encoding="utf-8"))
    values = [value for spec in (*task["tests"], *task["benchmarks"]) for value in spec.values()]
    assert values and all(isinstance(value, int) or value.isalpha() for value in values)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("softmax", "new"), "op=softmax: expected one of rmsnorm"),
        (("rmsnorm", "new", "--dtype", "int8"), "dtype=int8: expected one of"),
        (("rmsnorm", "."), "exists; expected a new folder"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_line(cli: Cli, words: tuple[str, ...], said: str) -> None:
    done = cli("kernelbot", "init", *words)
    assert (done.code, done.out) == (ExitCode.USAGE, "") and said in done.err
