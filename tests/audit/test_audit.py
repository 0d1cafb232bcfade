"""The audit of the gate: what counts as killed, what it says of it, and that a death of a process is no loss of it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from normcheck.audit import catalogue, equivalence, html, trial
from normcheck.audit import json as audit_json
from normcheck.audit import report as report
from normcheck.audit import run as audit
from normcheck.audit.mutants.kernel import CLEAN, Kernel
from normcheck.audit.mutants.mutant import Mutant, mutant
from normcheck.audit.options import AuditOptions
from normcheck.audit.rotation import by_turns
from normcheck.audit.score import Audit, Control, Outcome, Score
from normcheck.cases.core import drawn
from normcheck.cases.dtypes import DTYPES
from normcheck.gate.plan import PROFILES, Profile
from normcheck.reports._text import console_for
from tests.command_line import Cli
from tests.hostile_text import HARM
from tests.pages import require_sound

GOLDEN = Path(__file__).parents[2] / "golden" / "reports"
TINY = ("--op", "rmsnorm", "--dtype", "fp32", "--device", "cpu", "--workers", "1")

TWICE = Kernel(preact=lambda c: 2 * c.xh * c.g)
HALF = Kernel(preact=lambda c: c.xh * c.g / 2)
NEAR = Kernel(preact=lambda c: c.plus_b(c.xh * c.g * 1.001))


def ends(c: Any) -> Any:
    """A step that takes its process along, as a kernel that corrupts its heap does, and leaves exit code 0."""
    os._exit(0)


PLANTED = {
    planted.id: planted
    for planted in (
        mutant("twice", TWICE, what="y is twice what it should be", source="invented", outputs=("y",)),
        mutant("half", HALF, what="y is half of what it should be", source="invented", outputs=("y",)),
        mutant("near", NEAR, what="y is wrong by a thousandth", source="invented", outputs=("y",)),
        mutant("none", CLEAN, what="nothing is wrong", source="a test", outputs=("y",)),
        mutant("later", CLEAN, what="nothing is wrong", source="a test", outputs=("y",), promised="deep"),
        mutant("gpu", TWICE, what="a race", source="invented", outputs=("y",), device="cuda"),
        mutant("absent", CLEAN, what="p", source="invented", outputs=("y",), not_exercised="no op has dropout"),
        mutant("ends", Kernel(rstd=ends), what="the process ends", source="invented", outputs=("",), kinds=("crash",)),
    )
}


def planted(*ids: str) -> Callable[[], dict[str, Mutant]]:
    return lambda: {id: PLANTED[id] for id in ids or PLANTED}


def of_cases(number: int) -> Profile:
    """The profile quick, with so many cases at most: too few for a core."""
    return replace(PROFILES["quick"], max_examples=number, seconds=60.0, large_share=0.0)


AS_FOUND = replace(of_cases(40), shrink_seconds=0.0, explain_seconds=0.0)


def start_planted(device: str) -> None:
    """trial.start of a process that is spawned: what a test patches here is not patched there."""
    catalogue.mutants = planted()
    trial.PROFILES = {**PROFILES, "quick": AS_FOUND}
    trial.start(device)


@pytest.fixture
def run(cli: Cli) -> Cli:
    """normcheck audit."""
    return partial(cli, "audit")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the named mutants of this file in the place of the real ones, and no correct kernels beside them."""

    def plant(*ids: str, controls: tuple[Any, ...] = ()) -> None:
        monkeypatch.setitem(trial.PROFILES, "quick", AS_FOUND)  # what survives does so soon
        monkeypatch.setattr(catalogue, "mutants", planted(*ids))
        monkeypatch.setattr(catalogue, "controls", lambda: controls)

    return plant


def document() -> Any:
    return json.loads(Path("out.json").read_text(encoding="utf-8"))


# --- What is counted


@pytest.mark.slow
def test_a_mutant_of_the_project_is_killed(run: Cli) -> None:
    done = run("--mutant", "mD01", *TINY, "--seed", "3", "--report", "json:out.json")
    assert (done.code, done.err) == (0, "")
    assert done.last.startswith(
        "PASS  1 of 1 mutant killed (1 cell), named rightly 1 of 1 wrong values (100%), none wrongly; "
    )
    found = document()
    assert list(found)[:5] == ["schema", "normcheck", "argv", "seed", "profile"]
    assert (found["schema"], found["seed"], found["profile"], found["recipe"]) == (
        "normcheck-audit/1",
        3,
        "quick",
        None,
    )
    assert found["argv"][:3] == ["audit", "--mutant", "mD01"]
    assert (found["killed"], found["survivors"], found["not_exercised"], found["exit_code"]) == (1, [], [], 0)
    (entry,) = found["mutants"]
    assert (entry["id"], entry["op"], entry["dtype"], entry["status"]) == ("mD01", "rmsnorm", "fp32", "killed")
    assert (entry["kind"], entry["output"]) == ("mismatch", "dx")
    assert entry["case"].startswith("rmsnorm fp32 M=")
    assert entry["case"] in done.out
    assert 0 < entry["cases"] <= 300
    assert entry["seconds"] > 0
    assert entry["what"]
    assert entry["source"]


@pytest.mark.slow
def test_a_survivor_fails_the_audit(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice", "none", "absent")
    done = run(*TINY, "--report", "json:out.json")
    assert done.code == 1
    assert "\nSURVIVED  none " in done.out
    assert "survived rmsnorm fp32: " in done.out
    assert "core not finished, 40 of " in " ".join(done.out.split())  # a thin pass survives as well
    assert "; largest ratio " in " ".join(done.out.split())
    assert done.last.startswith(
        "FAIL  1 of 2 mutants killed (1 of 2 cells), 1 survived: none, 1 not exercised, "
        "named rightly 0 of 1 wrong values (0%), none wrongly; "
    )
    assert (document()["killed"], document()["survivors"], document()["not_exercised"]) == (1, ["none"], ["absent"])


def test_a_mutant_is_killed_only_in_all_of_its_cells() -> None:
    assert sample().score == Score(
        killed=("variance-n-1", "mR07"), survivors=("mY11",), not_exercised=("mW18.race", "mP01")
    )


def test_a_mutant_under_a_regime_has_a_score_of_its_own() -> None:
    found = sampled()
    assert found.score == sample().score
    assert found.regimes == {
        "tall": Score(killed=("variance-n-1@tall",)),
        "one_n:768": Score(survivors=("mY11@one_n:768",), not_exercised=("mR07@one_n:768",)),
    }
    document = audit_json.document(found)
    assert (document["killed"], document["survivors"], document["not_exercised"]) == (
        2,
        ["mY11"],
        ["mW18.race", "mP01"],
    )
    assert document["regimes"] == {
        "tall": {"killed": 1, "run": 1, "survivors": [], "not_exercised": []},
        "one_n:768": {"killed": 0, "run": 1, "survivors": ["mY11@one_n:768"], "not_exercised": ["mR07@one_n:768"]},
    }
    entries = document["mutants"]
    assert isinstance(entries, list)
    assert [entry["regime"] for entry in entries[-3:]] == ["tall", "one_n:768", "one_n:768"]
    assert audit.exit_code(found.outcomes[-3:-2], (), recipe="", complete=True) == 0
    assert audit.exit_code(found.outcomes[-3:], (), recipe="", complete=True) == 1


@pytest.mark.slow
def test_mutants_under_regimes_are_run_and_told(
    run: Cli, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("twice", "none", "later", "absent")
    small = replace(AS_FOUND.extent, rows=20, paired_rows=20, elements=3000, fine=False)
    monkeypatch.setitem(trial.PROFILES, "quick", replace(AS_FOUND, extent=small))
    monkeypatch.setattr(equivalence, "drawn", lambda *core: islice(drawn(*core), 6))  # what is no fault runs all twice
    done = run(*TINY, "--regime", "strided", "--regime", "no_bias", "--report", "json:out.json")
    assert done.code == 0
    assert "\nkilled    twice@strided " in done.out
    words = " ".join(done.out.split())
    told = "Under regimes killed 1 of 1 under no_bias, 2 not exercised killed 1 of 1 under strided, 2 not exercised Not"
    assert told in words
    same = "no case within the regime tells it from the clean kernel"
    assert f"none@no_bias, later@no_bias, none@strided, later@strided: {same}" in words
    assert done.last.startswith("PASS  2 of 2 killed under regimes (2 cells), 4 not exercised; median ")
    twice, none = document()["mutants"][:2]
    assert (twice["id"], twice["regime"], twice["status"]) == ("twice@no_bias", "no_bias", "killed")
    assert twice["case"].endswith("bias=none")
    assert twice["what"] == "y is twice what it should be, only without a bias"
    assert (none["id"], none["status"]) == ("none@no_bias", "not_exercised")


def test_what_lives_under_a_regime_fails_the_audit(
    run: Cli, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("twice")
    monkeypatch.setitem(trial.PROFILES, "quick", of_cases(3))  # no case of N = 768 among them
    done = run(*TINY, "--regime", "one_n:768")
    assert done.code == 1
    assert "survived rmsnorm fp32: 3 cases; not run, and fails: rmsnorm fp32 M=5 N=768 " in " ".join(done.out.split())
    assert done.last.startswith("FAIL  0 of 1 killed under regimes (0 of 1 cell), 1 survived: twice@one_n:768; ")


@pytest.mark.slow
def test_every_cell_of_a_mutant_under_a_regime(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice")
    argv = ("--op", "rmsnorm", "--device", "cpu", "--workers", "1", "--regime", "strided", "--regime-cells")
    assert "PASS  1 of 1 killed under regimes (1 cell); " in run(*argv, "one").last
    assert "PASS  1 of 1 killed under regimes (3 cells); " in run(*argv, "every").last


@pytest.mark.slow
def test_what_the_profile_does_not_promise_may_survive(run: Cli, plant: Callable[..., None]) -> None:
    plant("later")
    done = run(*TINY)
    assert done.code == 0
    assert "SURVIVED  later " in done.out
    assert done.last.startswith(
        "PASS  0 of 1 mutant killed (0 of 1 cell), 1 survived: later, which quick does not promise to kill; "
    )


@pytest.mark.slow
def test_a_false_alarm_fails_the_audit(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice", controls=(CLEAN.implementation("right", "rmsnorm"), TWICE.implementation("wrong", "rmsnorm")))
    done = run(*TINY, "--report", "json:out.json")
    assert done.code == 1
    assert "2 correct kernels, 2 cells, 31 cases: 1 accused (50.0%)\nACCUSED   wrong rmsnorm fp32: y\n" in done.out
    assert "2 correct kernels: 1 accused, named rightly 0 of 1 wrong values (0%), none wrongly; " in done.last
    assert [control["accused"] for control in document()["controls"]] == [False, True]
    assert document()["controls"][0]["cases"] == 30


def test_what_is_not_exercised_says_why(run: Cli, plant: Callable[..., None]) -> None:
    plant("gpu", "twice", "absent")
    done = run(*TINY, "--report", "json:out.json")
    assert done.code == 0
    assert "Not exercised\n  gpu: shows on a GPU only\n  absent: no op has dropout\n" in done.out
    assert [entry["status"] for entry in document()["mutants"]] == ["not_exercised", "killed", "not_exercised"]
    assert document()["mutants"][0]["reason"] == "shows on a GPU only"


def test_nothing_exercised(run: Cli, plant: Callable[..., None]) -> None:
    plant("gpu")
    done = run(*TINY)
    assert done.code == 5
    assert done.last.startswith("NOTHING EXERCISED  0 of 0 mutants killed (0 cells), 1 not exercised; ")


def test_a_fault_of_normcheck_is_no_kill(run: Cli, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cell: Any, *rest: Any, **options: Any) -> Any:
        raise RuntimeError("of its own")

    plant("twice", "none")
    monkeypatch.setattr(trial, "run_cell", fails)
    done = run(*TINY)
    assert done.code == 3
    assert "rmsnorm fp32: normcheck itself failed: RuntimeError: of its own" in done.out
    assert done.last.startswith("ERROR  0 of 2 mutants killed (0 cells), 2 cells not judged; ")


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_audit_reports_what_was_done(
    run: Cli, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch, which: signal.Signals
) -> None:
    real = trial.run_cell

    def interrupted(cell: Any, *rest: Any, **options: Any) -> Any:
        if cell.implementation.name == "none":
            os.kill(os.getpid(), which)
        return real(cell, *rest, **options)

    plant("twice", "none")
    monkeypatch.setattr(trial, "run_cell", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    done = run(*TINY, "--report", "json:out.json")
    signal.signal(signal.SIGINT, before)
    assert done.code == 130
    assert done.last.startswith("INCOMPLETE  stopped before the end; so far 1 of 1 mutant killed (1 cell)")
    assert (document()["complete"], document()["exit_code"], len(document()["mutants"])) == (False, 130, 1)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--mutant", "mD1"), "mutant=mD1: expected one of mD"),
        (("--op", "batchnorm"), "op=batchnorm: expected one of layernorm"),
        (("--dtype", "fp8"), "dtype=fp8: expected one of fp16"),
        (("--profile", "slow"), "profile=slow: expected one of quick, ci, deep"),
        (("--workers", "0"), "workers=0: expected an integer from 1"),
        (("--report", "terminal:-"), "report=terminal:-: expected FORMAT:PATH with FORMAT one of json, html"),
        (("--report", "json:no/such/folder.json"), "report=json:no/such/folder.json: expected a path"),
        (("--recipe", "guess"), "recipe=guess: expected "),
        (("--regime", "wide"), "regime=wide: expected one of tall, one_n:1, "),
        (("--regime", "tall", "--recipe", "kernelbench"), "regime=tall: expected no --recipe with it"),
        (("--regime", "tall", "--regime-cells", "2"), "regime_cells=2: expected one of one, every"),
        (("--regime", "tall", "--cells", "turns"), "cells=turns: expected --regime-cells beside --regime"),
        (("--cells", "one"), "cells=one: expected one of every, turns"),
    ],
)
def test_wrong_usage(run: Cli, argv: tuple[str, ...], complaint: str) -> None:
    done = run(*argv, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"normcheck: {complaint}")
    assert done.err.count("\n") == 1


def test_json_on_standard_output_is_nothing_but_json(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice")
    done = run(*TINY, "--report", "json:-")
    assert json.loads(done.out)["killed"] == 1
    assert "PASS  1 of 1 mutant killed" in done.err


# --- Which cells are run


def chosen(cells: str, **options: Any) -> list[trial.Trial]:
    return list(audit.trials_of(AuditOptions(device="cpu", cells=cells, **options)))


@pytest.mark.slow
def test_by_turns_each_mutant_runs_in_each_of_its_ops_in_one_dtype() -> None:
    def plain(trials: list[trial.Trial]) -> list[trial.Trial]:
        return [t for t in trials if not t.regime and not t.control]

    every, turns = plain(chosen("every")), plain(chosen("turns"))
    cells = [(t.name, t.op) for t in turns]
    assert cells == list(dict.fromkeys((t.name, t.op) for t in every))
    full = {"shrink": True, "explain": True}
    assert {replace(t, **full) for t in turns} <= {replace(t, **full) for t in every}
    assert sum(t.explain for t in turns) == sum(t.explain for t in every) == len({t.name for t in every})
    assert not any(t.shrink for t in turns)
    assert sum(t.shrink for t in every) == len({t.name for t in every})
    for id, fault in catalogue.mutants().items():
        own = [t.dtype for t in turns if t.name == id]
        assert len(set(own)) == min(len(fault.ops), len(fault.dtypes)), id
    sampled = [[t for t in chosen(cells) if t.regime] for cells in ("turns", "every")]
    assert sampled[0] == sampled[1]


@pytest.mark.slow
def test_by_turns_each_correct_kernel_runs_in_each_of_its_ops_in_one_dtype() -> None:
    every, turns = ([t for t in chosen(cells) if t.control] for cells in ("every", "turns"))
    assert set(turns) <= set(every)
    assert Counter((t.name, t.op) for t in turns) == Counter({(t.name, t.op) for t in every})
    makes = Counter((t.op, t.dtype) for t in turns)
    of_many_makes = ("layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm")
    assert all(makes[op, dtype] >= 5 for op in of_many_makes for dtype in DTYPES)


def test_by_turns_each_dtype_has_about_a_third() -> None:
    free = {id for id, fault in catalogue.mutants().items() if len(fault.dtypes) == len(DTYPES)}
    for op in ("", "layernorm", "rmsnorm"):
        options = {"op": (op,)} if op else {}
        met = Counter(t.dtype for t in chosen("turns", mutant=tuple(free), **options))
        assert set(met) == set(DTYPES)
        deviation = (met.total() * 2 / 9) ** 0.5  # of a share, if each fault draws one of three
        assert all(abs(share - met.total() / 3) < 2 * deviation for share in met.values()), (op, met)


def test_turns_are_the_same_on_every_machine() -> None:
    cells = by_turns(catalogue.mutants()["mD01"], DTYPES)
    assert [dtype for _, dtype in cells] == ["bf16", "fp32", "fp16", "bf16"]
    assert [(t.op, t.dtype) for t in chosen("turns", mutant=("mD01",), op=("rmsnorm",))] == list(cells[-1:])
    assert {t.dtype for t in chosen("turns", mutant=("mD01",), dtype=("bf16",))} == {"bf16"}


def test_a_mutant_by_turns_has_one_cell_of_an_op(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice")
    done = run("--op", "rmsnorm", "--device", "cpu", "--workers", "1", "--cells", "turns")
    assert done.last.startswith(
        "PASS  1 of 1 mutant killed (1 cell), named rightly 0 of 1 wrong values (0%), none wrongly; "
    )


# --- Processes


@pytest.mark.slow
def test_a_death_is_a_kill_and_costs_no_other_cell(
    run: Cli, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries(*argv: str) -> list[dict[str, Any]]:
        assert run(*TINY[:-1], *argv, "--report", "json:out.json").code == 0
        return [{**entry, "seconds": 0} for entry in document()["mutants"]]

    monkeypatch.setattr(audit, "start", start_planted)
    plant("twice", "half", "gpu")
    alone = entries("1")
    monkeypatch.setattr(catalogue, "mutants", planted("twice", "half", "ends", "gpu"))
    twice, half, ends, gpu = entries("2")
    assert (ends["status"], ends["kind"], ends["output"]) == ("killed", "crash", "")
    assert ends["reason"] == "its process ended while nothing else ran in it"
    assert [twice, half, gpu] == alone


# --- A recipe


def test_a_recipe_is_measured_not_judged(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice", "near", "none", "gpu", controls=(CLEAN.implementation("right", "rmsnorm"),))
    done = run(*TINY, "--recipe", "atol=1e-2,rtol=1e-2", "--report", "json:out.json")
    assert done.code == 0
    assert done.last.startswith(
        "MEASURED  recipe atol=1e-2,rtol=1e-2: 1 of 2 mutants killed (1 of 2 cells), 1 survived: near, 2 not"
    )
    assert document()["recipe"] == "atol=1e-2,rtol=1e-2"
    twice, near, none, gpu = document()["mutants"]
    assert (twice["status"], twice["kind"], twice["output"], twice["cases"]) == ("killed", "mismatch", "y", 1)
    assert (near["status"], near["cases"]) == ("survived", 1)
    assert (none["status"], none["reason"]) == ("not_exercised", "bit-identical to the clean kernel")
    assert (gpu["status"], gpu["reason"]) == ("not_exercised", "shows on a GPU only")
    assert [control["accused"] for control in document()["controls"]] == [False]


def test_a_recipe_is_asked_only_of_what_it_has(run: Cli, plant: Callable[..., None]) -> None:
    plant("twice")
    done = run(*TINY, "--recipe", "triton-tutorial")  # layernorm in fp16
    assert done.code == 5
    assert done.last.startswith("NOTHING EXERCISED  no cell is left of what was asked; ")
    assert run("--recipe", "kernelbench", "--device", "cuda").code == 2


# --- How it is told


def outcome(id: str, op: str, dtype: str, **changes: Any) -> Outcome:
    killed = {"status": "killed", "kind": "mismatch", "output": "rstd", "cases": 7, "seconds": 0.31}
    told = {"what": "the variance is divided by N - 1", "source": "tile-ai/tilelang#1234", "case": f"{op} {dtype} M=1"}
    return Outcome(id=id, op=op, dtype=dtype, **{**killed, **told, **changes})


def sample(**changes: Any) -> Audit:
    survived = {"status": "survived", "kind": "", "output": "", "case": "", "cases": 300, "seconds": 4.02}
    skipped = {"status": "not_exercised", "kind": "", "output": "", "case": "", "cases": 0, "seconds": 0.0}
    right = [Control(name=n, op="rmsnorm", dtype="fp16", accused=False, cases=60) for n in ("one", "two")]
    fields: dict[str, Any] = {
        "argv": ("audit",),
        "seed": 0,
        "profile": "quick",
        "recipe": "",
        "seconds": 130.2,
        "environment": {"normcheck": "0.1.0", "torch": "2.13.0+cpu", "device": "x86_64 CPU, 1 threads"},
        "outcomes": (
            outcome("variance-n-1", "layernorm", "fp16"),
            outcome("variance-n-1", "layernorm", "fp32", output="y", cases=1_204, seconds=61.0),
            outcome("mY11", "rmsnorm", "fp16", output="y", kind="unwritten"),
            outcome("mY11", "rmsnorm", "bf16", **survived, reason="largest ratio 0.97 (y), rmsnorm bf16 M=3 N=1"),
            outcome(
                "mR07", "rmsnorm", "fp16", output="", kind="crash", what="an index overflows 32 bits where M * N is"
            ),
            outcome("mR07", "layernorm", "fp16", **skipped, reason="declares only fp32"),
            outcome("mW18.race", "layernorm", "fp16", **skipped, reason="shows on a GPU only"),
            outcome("mP01", "layernorm", "fp16", **skipped, reason="no op here has dropout"),
        ),
        "controls": tuple(right),
        "exit_code": 1,
    }
    return Audit(**{**fields, **changes})


def passing() -> Audit:
    return sample(outcomes=tuple(o for o in sample().outcomes if o.id != "mY11"), exit_code=0)


def accusing() -> Audit:
    wrong = {
        "accused": True,
        "kind": "mismatch",
        "output": "dx",
        "case": "rmsnorm fp16 M=1 N=3",
        "message": "dx is off",
    }
    controls = (*sample().controls, replace(sample().controls[1], **wrong))
    return replace(passing(), controls=controls, exit_code=1)


def sampled() -> Audit:
    told = {"cases": 88, "what": "the variance is divided by N - 1, only from 64 rows on"}
    none = {"kind": "", "output": "", "case": ""}
    reason = "not run, and fails: rmsnorm bf16 M=5 N=768; largest ratio 0.97 (y), rmsnorm bf16 M=3 N=1"
    under = (
        outcome("variance-n-1@tall", "layernorm", "fp16", regime="tall", **told),
        outcome("mY11@one_n:768", "rmsnorm", "bf16", regime="one_n:768", status="survived", reason=reason, **none),
        outcome("mR07@one_n:768", "rmsnorm", "fp16", regime="one_n:768", status="not_exercised", reason="none", **none),
    )
    return sample(outcomes=(*sample().outcomes, *under))


SAMPLES: dict[str, Callable[[], Audit]] = {
    "pass": passing,
    "fail": sample,
    "regimes": sampled,
    "regimes_only": lambda: replace(sampled(), outcomes=sampled().outcomes[-3:], controls=()),
    "accused": accusing,
    "recipe": lambda: replace(sample(), recipe="atol=1e-2,rtol=1e-2", exit_code=0),
    "nothing": lambda: replace(sample(), outcomes=sample().outcomes[-2:], controls=(), exit_code=5),
}


def written(done: Audit, *, width: int = 80, **options: bool) -> str:
    stream = io.StringIO()
    report.render(done, console_for(stream, width=width), **options)
    return stream.getvalue()


@pytest.mark.parametrize("name", [*SAMPLES, "details"])
def test_text(name: str, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[str, str], None]) -> None:
    for variable in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    text = written(sample(), details=True) if name == "details" else written(SAMPLES[name]())
    recorded(f"reports/audit_{name}.txt", text)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("audit_*")} == {f"audit_{name}" for name in (*SAMPLES, "details")}


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_mutant_takes_one_line_of_the_width(name: str, width: int) -> None:
    lines = written(SAMPLES[name](), width=width).rstrip("\n").split("\n")
    assert [line for line in lines[:-1] if len(line) > width and " killed by " not in line] == []
    if width == 200 and name == "pass":
        assert "  the variance is divided by N - 1\n" in written(passing(), width=width)


def test_foreign_text_is_shown_literally() -> None:
    hostile = outcome("[red]x\x1b[31m", "layernorm", "fp16", what="[bold]\x07", source="\u202ey")
    text = written(sample(outcomes=(hostile,)), width=200, details=True)
    assert r"[red]x\x1b[31m" in text
    assert r"[bold]\x07" in text
    assert r"\u202ey" in text


def test_strict_json() -> None:
    stream = io.StringIO()
    audit_json.write(sample(seconds=math.nan), stream)
    found = json.loads(stream.getvalue(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert found["seconds"] == "NaN"
    assert found["counts"]["cells"] == 8
    assert [found["counts"][f"cells_{status}"] for status in ("killed", "survived", "not_exercised")] == [4, 1, 3]


def test_progress_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with report.live(console_for(stream, width=80), 8) as show:
            for result in (*sample().outcomes[:1], *sample().controls[:1]):
                show(result)
    assert pipe.getvalue() == ""
    assert re.search(r"\[1/8\] [0-9.]+ s  cells: 1 killed", terminal.getvalue())
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("harm", ["", *HARM])
def test_the_page_of_an_audit(harm: str) -> None:
    """It says what the terminal says, foreign text is text in it, and it is the JSON report as well."""
    told = accusing()
    odd = replace(told.outcomes[0], id=f"odd{harm}", what=harm, case=harm)
    accused = replace(told.controls[-1], name=f"other{harm}", message=harm or "dx is off")
    told = replace(told, outcomes=(*told.outcomes, odd), controls=(*told.controls, accused), argv=("audit", harm))
    stream, plain = io.StringIO(), io.StringIO()
    html.write(told, stream)
    audit_json.write(told, plain)
    page = require_sound(stream.getvalue())
    (data,) = re.findall(r'<script type="application/json" id="normcheck-report">(.*?)</script>', stream.getvalue())
    assert json.loads(data) == json.loads(plain.getvalue())
    assert page.headings[1:] == ["FAIL", "Score", "Planted faults", "Correct kernels", "How it was made"]
    for words in (
        "3 of 3 killed",
        "the variance is divided by N - 1",
        "✓ killed",
        "shows on a GPU only",
        "✓ left alone",
    ):
        assert words in page.text, words
    assert page.text.count("✗ accused: dx") == 2


def test_the_page_of_a_survivor() -> None:
    stream = io.StringIO()
    html.write(sample(), stream)
    page = require_sound(stream.getvalue())
    assert "✗ survived" in page.text and "largest ratio 0.97 (y)" in page.text
