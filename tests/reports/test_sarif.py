"""The SARIF report, against classes that somebody else made from the OASIS schema, which forbid what it has not."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from normcheck.reports import sarif
from normcheck.result import SweepResult
from tests.command_line import Cli, KernelFile
from tests.hostile_text import HARM
from tests.sample_runs import RUNS, errors, failed, failing, finding, hostile, known, large, run, verdict

ALL = {**RUNS, "hostile": hostile, "large": large}


def text_of(a_run: SweepResult) -> str:
    stream = io.StringIO()
    sarif.REPORT.write(a_run, stream)
    return stream.getvalue()


def validate(text: str) -> None:
    """No word that the schema does not have, and no value of another type."""
    from fluidattacks_core.sarif import SarifLog  # half a second, for a process that runs other tests

    SarifLog.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def loaded(a_run: SweepResult) -> Any:
    text = text_of(a_run)
    validate(text)
    return json.loads(text)["runs"][0]


@pytest.mark.parametrize("name", ALL)
def test_valid(name: str) -> None:
    a_run = ALL[name]()
    told = loaded(a_run)
    assert len(told["results"]) == sum(v.status == "fail" for v in a_run.verdicts)
    for result in told["results"]:
        assert told["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_the_schema_would_object() -> None:
    """A test of the validation: a word that SARIF does not have, and a line that it cannot have."""
    document = json.loads(text_of(failing()))
    document["runs"][0]["results"][0]["levle"] = "error"
    with pytest.raises(ValueError, match="validation error"):
        validate(json.dumps(document))
    document = json.loads(text_of(failing()))
    document["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    with pytest.raises(ValueError, match="validation error"):
        validate(json.dumps(document))


def physical(result: Any) -> Any:
    return result["locations"][0]["physicalLocation"]


def test_a_failure_is_at_its_file_and_line() -> None:
    wrong, raised = loaded(failing())["results"]
    assert physical(wrong)["artifactLocation"] == {"uri": "kernels/mine.py", "uriBaseId": "%SRCROOT%"}
    assert physical(wrong)["region"] == {"startLine": 12}
    assert physical(raised)["region"] == {"startLine": 15}
    assert (wrong["ruleId"], raised["ruleId"]) == ("mismatch", "exception")
    assert wrong["properties"]["reproduce"] == finding().reproduce


def test_addresses_are_escaped() -> None:
    def uri(file: str) -> str:
        (result,) = loaded(run(failed(finding(), file=file, line=1), status="fail"))["results"]
        return str(physical(result)["artifactLocation"]["uri"])

    assert uri("a b/[x]%.py") == "a%20b/%5Bx%5D%25.py"
    assert uri("/tmp/a b.py") == "file:///tmp/a%20b.py"
    assert uri("\udc80.py") == "%80.py"


def test_a_cell_without_a_file() -> None:
    (result,) = loaded(run(failed(finding(), file="", line=None), status="fail"))["results"]
    assert result["locations"] == [
        {"logicalLocations": [{"fullyQualifiedName": "rmsnorm/mine.py/fp16", "kind": "function"}]}
    ]


def test_a_known_failure_is_suppressed() -> None:
    (result,) = loaded(known())["results"]
    assert result["suppressions"] == [{"kind": "external"}]


def test_what_could_not_be_judged_is_no_success() -> None:
    (invocation,) = loaded(errors())["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["exitCode"] == 3
    assert any("MemoryError" in n["message"]["text"] for n in invocation["toolExecutionNotifications"])


def test_a_fingerprint_does_not_depend_on_numbers() -> None:
    runs = [
        run(failed(finding(ratio=ratio, message=str(ratio)), line=int(ratio)), status="fail") for ratio in (2.0, 9.0)
    ]
    first, second = (loaded(each)["results"][0]["partialFingerprints"] for each in runs)
    assert first == second


@pytest.mark.parametrize("text", [*HARM, "{0}", "[a](b)", "x" * 1_000_000])
def test_harmful_text(text: str) -> None:
    """No link and no placeholder for a viewer, ASCII for a stream, and an end."""
    failure = finding(message=text, advice=text, mismatched=None, check=text)
    a_run = run(
        verdict(implementation=text, dtype=text, status="fail", failure=failure, file=text, line=3),
        verdict(status="error", detail=text),
        messages=(text,),
        status="fail",
    )
    written = text_of(a_run)
    assert written.isascii()
    assert len(written) < 60_000
    told = loaded(a_run)
    shown = told["results"][0]["message"]["text"]
    assert "](" not in shown
    assert "{0}" not in shown.replace("{{", "").replace("}}", "")
    assert all(line.isprintable() for line in shown.split("\n"))


@pytest.mark.slow
def test_a_wrong_gradient_is_at_the_line_of_its_backward(cli: Cli, kernel_file: KernelFile) -> None:
    path = kernel_file(OWN_BACKWARD)
    words = ("--dtype", "fp32", "--max-examples", "3", "--allow-thin", "--no-contexts", "--report", "sarif:-")
    (result,) = json.loads(cli("verify", "--impl", str(path), *words).out)["runs"][0]["results"]
    start = physical(result)["region"]["startLine"]
    assert path.read_text(encoding="utf-8").splitlines()[start - 1].startswith("def backward")


OWN_BACKWARD = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * rstd * weight.float()).to(x.dtype)

def backward(dy, x, weight, bias, saved, *, eps):
    return {"dx": dy.clone(), "dw": torch.zeros_like(weight)}

IMPLEMENTATIONS = (Implementation(name="own", op="rmsnorm", forward=forward, backward=backward, biases=(False,)),)
"""
