"""The options of ``normcheck verify``, and of the commands that share them. Each is declared once, see ``options``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from normcheck.errors import UsageError, one_line
from normcheck.gate.requirements import requirement
from normcheck.options import Option, at_least, count, seconds, several, within


def ops() -> Iterable[str]:
    """Names of ops."""
    from normcheck.cases.ops import OPS

    return OPS


def layouts() -> Iterable[str]:
    """Names of layouts."""
    from normcheck.cases.layouts import LAYOUTS

    return LAYOUTS


def contexts() -> Iterable[str]:
    """Names of contexts."""
    from normcheck.contexts.catalogue import CONTEXTS

    return CONTEXTS


def dtypes() -> Iterable[str]:
    """Names of dtypes."""
    from normcheck.cases.dtypes import DTYPES

    return DTYPES


PROMISING = ("quick", "ci", "deep")
"""Profiles that end by themselves, the cheapest first: what one of them finds, those after it find as well."""


def profiles() -> Iterable[str]:
    """Names of profiles, those of ``plan.PROFILES``, which cannot be imported without torch."""
    return *PROMISING, "soak"


def _sweeping() -> Iterable[str]:
    return PROMISING


def judges() -> Iterable[str]:
    """Names of judges, those of ``oracle.judging.JUDGES``, which cannot be imported without torch."""
    return "fused", "plain"


def devices() -> Iterable[str]:
    """Names of devices."""
    return "auto", "cpu", "cuda"


def _implementations() -> Iterable[str]:
    from normcheck.impls import discovery

    return discovery.implementations()


def _formats() -> Iterable[str]:
    from normcheck.reports.report import formats

    return (f"{name}:" for name in formats())


def _requirements(texts: tuple[str, ...]) -> None:
    for text in texts:
        requirement(text)


def _dtypes(value: object) -> tuple[str, ...]:
    from normcheck.cases.dtypes import named

    return tuple(map(named, several(value)))


def _seed(value: object) -> object:
    """The integer in a text; a new one for ``random``."""
    if not isinstance(value, str):
        return value
    if value == "random":
        import secrets

        return secrets.randbelow(1 << 31)
    if not re.fullmatch(r"-?[0-9]{1,1000}", value):
        raise ValueError(f"{one_line(value, 60)}: expected an integer of at most 1000 digits, or random")
    return int(value)


def _schedulers() -> Iterable[str]:
    """What a shell offers for --scheduler."""
    return "local", "slurm", "tcp://", "tls://"


def _scheduler(value: str) -> None:
    """``local``, ``slurm``, or the address of a Dask scheduler."""
    if value and not re.fullmatch(r"local|slurm|(tcp|tls)://[^\s:/]+:[0-9]{1,5}", value):
        raise ValueError(f"{one_line(value, 120)}: expected local, slurm, tcp://HOST:PORT or tls://HOST:PORT")


Ops = Annotated[tuple[str, ...], Option(help="Op to check; may repeat. Default: all.", names=ops, read=several)]
Impls = Annotated[
    tuple[str, ...],
    Option(
        help="Known name, FILE.py, FILE.py:NAME or MODULE:NAME; may repeat. Default: see list.",
        names=_implementations,
        open=True,
        files=True,
        read=several,
    ),
]
Dtypes = Annotated[
    tuple[str, ...], Option(help="fp16, bf16 or fp32; may repeat. Default: all.", names=dtypes, read=_dtypes)
]
Layouts = Annotated[
    tuple[str, ...],
    Option(
        help="Only cases of this layout, such as heads or strided; may repeat. Default: all that are declared.",
        names=layouts,
        read=several,
    ),
]
Profile = Annotated[str, Option(help="quick, ci or deep: how much a cell may cost.", names=_sweeping)]
Seed = Annotated[int, Option(help="Another seed draws other cases; random draws one.", read=_seed, text=True)]
NewSeed = Annotated[int | None, Option(help="Draws the cases. Default: another one each time.", read=_seed, text=True)]
Device = Annotated[str, Option(help="auto, cpu or cuda.", names=devices)]
Reports = Annotated[
    tuple[str, ...],
    Option(help="FORMAT:PATH, such as json:out.json; - is standard output.", names=_formats, open=True, read=several),
]
TimeBudget = Annotated[float | None, Option(help="Seconds per cell, after its core.", check=seconds)]
Timeout = Annotated[float, Option(help="Seconds that a case may take.", check=seconds)]
Sandboxed = Annotated[
    bool,
    Option(
        help="Let a kernel's process write only to a folder of its own (default), or wherever you may.",
        flags=("--sandbox/--no-sandbox",),
    ),
]


def _each_once(value: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(several(value)))


Contexts = Annotated[
    tuple[str, ...],
    Option(
        help="Context in which a cell is tried after its core, such as thread or graph; may repeat. Default: all.",
        names=contexts,
        read=_each_once,
    ),
]


RequiredContexts = Annotated[
    tuple[str, ...],
    Option(
        help="Context that must be tried and hold; may repeat. One that the kernel prevents is a finding.",
        names=contexts,
        read=_each_once,
    ),
]


ALL_CONFIGURATIONS = ("all", "won")
"""What ``--configs`` may say: each configuration of an autotuner is judged, or the one that won."""


def configuration(text: str) -> None:
    """Raise ValueError unless ``text`` is ``[KERNEL:]NUMBER``, or "" for no configuration of all."""
    if text:
        from normcheck.impls.kernels.configurations import parts

        parts(text)


def _configurations() -> Iterable[str]:
    return ALL_CONFIGURATIONS


def _configs(text: str) -> None:
    if text not in ALL_CONFIGURATIONS:
        try:
            configuration(text)
        except ValueError:
            raise ValueError(f"{one_line(text, 60)}: expected {' or '.join(ALL_CONFIGURATIONS)}") from None


JudgeName = Annotated[str, Option(help="fused (default): what passes is judged by few kernels; plain.", names=judges)]

Solution = Annotated[
    str, Option(help="solution.json of flashinfer-bench or SOL-ExecBench, in place of --impl.", stored=False)
]
Definition = Annotated[str, Option(help="definition.json of --solution.", stored=False)]
Workload = Annotated[str, Option(help="workload.jsonl: the shapes of --solution.", stored=False)]
KernelBench = Annotated[
    tuple[str, str] | None, Option(help="PROBLEM.py ANSWER.py of KernelBench, in place of --impl.", stored=False)
]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of ``normcheck verify``, in the order of its help, and two facts from ``config.settings``.

    ``from_config``: names of the options whose values come from the configuration file. ``part``: whether the command
    line chooses some of that file's cells.
    """

    op: Ops = ()
    impl: Impls = ()
    dtype: Dtypes = ()
    layout: Layouts = ()
    profile: Annotated[
        str, Option(help="quick, ci or deep: how much a cell may cost; soak runs until it is stopped.", names=profiles)
    ] = "quick"
    max_examples: Annotated[int | None, Option(help="Cases per cell, its core included.", check=count)] = None
    time_budget: TimeBudget = None
    seed: Seed = 0
    device: Device = "auto"
    require: Annotated[
        tuple[str, ...],
        Option(
            help="Implementation that must run here; NAME:100: so many cases a cell; NAME:N=16384: a size; may repeat.",
            names=_implementations,
            open=True,
            files=True,
            check=_requirements,
            read=several,
        ),
    ] = ()
    allow_thin: Annotated[bool, Option(help="A cell whose core was not finished does not fail the run.")] = False
    report: Reports = ()
    timeout: Timeout = 120.0
    workers: Annotated[
        int | None,
        Option(help="Cells that are checked side by side; by default what fits the machine.", check=within(1, 64)),
    ] = None
    isolation: Annotated[
        bool,
        Option(
            help="Run kernels in processes of their own (default), or in this.",
            flags=("--isolation/--no-isolation",),
        ),
    ] = True
    sandbox: Sandboxed = True
    judge: JudgeName = "fused"
    context: Contexts = ()
    contexts: Annotated[
        bool,
        Option(
            help="Try each cell in contexts after its core (default), or only in eager mode.",
            flags=("--contexts/--no-contexts",),
        ),
    ] = True
    require_context: RequiredContexts = ()
    configs: Annotated[
        str,
        Option(
            help="Configurations of a Triton autotuner that are judged: all or won. Default: all; in quick, of a file.",
            names=_configurations,
            open=True,
            check=_configs,
        ),
    ] = ""
    scheduler: Annotated[
        str,
        Option(
            help="Dask judges the cells: local, slurm, or an existing cluster at tcp://HOST:PORT.",
            names=_schedulers,
            open=True,
            check=_scheduler,
            stored=False,
        ),
    ] = ""
    shard: Annotated[str, Option(help="K/N: of all cases those of job K of N; see normcheck merge.", stored=False)] = ""
    timings: Annotated[
        str,
        Option(help="JSON report of an earlier run: --shard then shares out whole cells, by the seconds they took."),
    ] = ""
    database: Annotated[str, Option(help="Folder of cases that failed: kept there, and run first next time.")] = ""
    known_failures: Annotated[str, Option(help="File of cells that are known to fail: OP IMPL DTYPE  # reason.")] = ""
    baseline: Annotated[str, Option(help="File of normcheck baseline make; drift from it fails.")] = ""
    drift_ratio: Annotated[float, Option(help="Times the stored ratio that is drift.", check=at_least(1))] = 2.0
    drift_ulp: Annotated[float, Option(help="Ulps more that are drift.", check=at_least(0))] = 1.0
    solution: Solution = ""
    definition: Definition = ""
    workload: Workload = ""
    trace: Annotated[str, Option(help="File for the verdict on each workload, as their Trace.", stored=False)] = ""
    kernelbench: KernelBench = None
    config: Annotated[
        str, Option(help="TOML file with [tool.normcheck]. Default: the nearest pyproject.toml.", stored=False)
    ] = ""
    watch: Annotated[
        bool,
        Option(help="Run again when a file under test is saved, until Ctrl-C.", flags=("--watch",), stored=False),
    ] = False
    quiet: Annotated[
        bool, Option(help="Show only failures and the last line.", flags=("-q", "--quiet"), stored=False)
    ] = False
    verbose: Annotated[
        bool,
        Option(
            help="Show all that was measured, and every reason why a case was not run.",
            flags=("-v", "--verbose"),
            stored=False,
        ),
    ] = False
    from_config: tuple[str, ...] = ()
    part: bool = False

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if self.workers is not None and self.workers > 1 and not self.isolation:
            raise UsageError(f"workers={self.workers}: expected 1 with --no-isolation, where all is one process")
        if self.scheduler and not self.isolation:
            raise UsageError(f"scheduler={self.scheduler}: expected no --no-isolation; other processes judge")
        if self.scheduler and self.watch:
            raise UsageError(f"scheduler={self.scheduler}: expected no --watch with it, which is for this machine")
        for name, asked in (("context", self.context), ("require_context", self.require_context)):
            if asked and not self.contexts:
                raise UsageError(f"{name}={', '.join(asked)}: expected no --no-contexts, which leaves all out")
        if self.quiet and self.verbose:
            raise UsageError("quiet, verbose: expected one of -q and -v, or neither")

    @property
    def loads(self) -> bool:
        """Whether it asks for a loader: a solution, or an answer to a problem."""
        named = (self.solution, self.definition, self.workload, self.trace)
        return self.kernelbench is not None or any(named)

    @property
    def verbosity(self) -> int:
        """-1 quiet, 1 verbose."""
        return int(self.verbose) - int(self.quiet)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The options of ``normcheck list --cases``."""

    op: Ops = ()
    impl: Impls = ()
    dtype: Dtypes = ()
    profile: Annotated[Profile, Option(help="quick, ci or deep.")] = "quick"
    seed: Annotated[int, Option(help="As of verify: another seed has another core.")] = 0
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class ReproOptions:
    """The options of ``normcheck repro``."""

    device: Device = "auto"
    timeout: Timeout = 120.0
    isolation: Annotated[
        bool,
        Option(help="Run kernels in processes of their own, or in this one.", flags=("--isolation/--no-isolation",)),
    ] = True
    sandbox: Sandboxed = True
    context: Annotated[Contexts, Option(help="Also call it in this context; may repeat. Default: none.")] = ()
    require_context: RequiredContexts = ()
    configs: Annotated[
        str, Option(help="[KERNEL:]NUMBER of the configuration that its autotuners take.", check=configuration)
    ] = ""
    dump: Annotated[
        str | None, Option(help="New folder for inputs, outputs, reference and bounds, and a script to read it.")
    ] = None
    pdb: Annotated[bool, Option(help="In this process: stop where it raises, or where its functions return.")] = False
    solution: Annotated[Solution, Option(help="In place of IMPLEMENTATION, as for verify.")] = ""
    definition: Definition = ""
    workload: Workload = ""
    kernelbench: Annotated[KernelBench, Option(help="PROBLEM.py ANSWER.py, in place of IMPLEMENTATION.")] = None

    @property
    def loads(self) -> bool:
        """Whether it asks for a loader."""
        return self.kernelbench is not None or any((self.solution, self.definition, self.workload))
