"""A session: the owner of the process in which a kernel's code runs.

Such a process begins and ends only by ``with session_of(implementation) as session``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.contexts.later import note_state
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import configurations
from normcheck.impls.kernels.configurations import Configuration
from normcheck.runner import compiled
from normcheck.runner.arena import Surroundings
from normcheck.runner.carried import CARRIER, CarriedRun
from normcheck.runner.run import LocalRun, Run
from normcheck.runner.time_limit import alarm

FIRST_CALLS = 3.0
"""The first call of each kind in a process, which may compile, has so many times the limit of its case."""


class Session(Protocol):
    """Work with one kernel. On entry its process runs; on exit it is gone, with all processes that it started."""

    @property
    def isolated(self) -> bool:
        """Whether the kernel's code runs in a process of its own, which may die without this one."""
        ...

    @property
    def before(self) -> tuple[Case, ...]:
        """The cases that the kernel's process began before the present one, in order; () if it has no process."""
        ...

    @property
    def idle_seconds(self) -> float:
        """For how long calls kept this process waiting and did nothing themselves, not even wait for a processor."""
        ...

    @property
    def eager_calls(self) -> int:
        """How often torch.compile ran a function as it is, in one process of the kernel; see ``compiled``."""
        ...

    @property
    def graphs(self) -> int:
        """How many graphs torch.compile has compiled in one process of the kernel."""
        ...

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """Those that the tuners allowed called since ``configure``, in the kernel's present process."""
        ...

    def configure(self, configuration: str) -> None:
        """Have the kernel's autotuners take this configuration from now on, see ``kernels.configurations.ask``."""
        ...

    def start(self) -> None:
        """Start the process without waiting for it, so that entry waits less."""
        ...

    def restart(self, *, cleanly: bool = False) -> None:
        """Make the next call in a new process; ``cleanly``: in one that no other kernel's process can have harmed."""
        ...

    def case(self, case: Case, seconds: float, first_calls: float = FIRST_CALLS) -> AbstractContextManager[None]:
        """Run ``case`` inside the block, for at most ``seconds``. Raises TimeIsUp or Broken when they are over.

        ``first_calls``: in place of FIRST_CALLS, in a process of the kernel's own.
        """
        ...

    def home(self, case: Case, device: str) -> str:
        """The device on which the tensors of ``case`` are made and judged, if the kernel runs on ``device``."""
        ...

    def copies(self, inputs: Inputs) -> Inputs:
        """Copies of the inputs of the present case, with what lies around each, for calls to use until it ends."""
        ...

    def run(self, surroundings: Surroundings) -> Run:
        """A new run of the kernel."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class LocalSession:
    """Work with a kernel in this process, which the session neither starts nor ends."""

    isolated = False
    before: tuple[Case, ...] = ()
    idle_seconds = 0.0

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation
        self._eager_before, self._graphs_before = compiled.eager_calls(), compiled.graphs()
        note_state(anew=False)

    @property
    def eager_calls(self) -> int:
        """See ``Session``."""
        return compiled.eager_calls() - self._eager_before

    @property
    def graphs(self) -> int:
        """See ``Session``."""
        return compiled.graphs() - self._graphs_before

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """See ``Session``."""
        return configurations.seen()

    def configure(self, configuration: str) -> None:
        """See ``Session``."""
        configurations.ask(configuration)

    def start(self) -> None:
        """Do nothing: this process runs already."""

    def restart(self, *, cleanly: bool = False) -> None:
        """Do nothing: this process cannot be replaced."""

    @contextmanager
    def case(self, case: Case, seconds: float, first_calls: float = FIRST_CALLS) -> Iterator[None]:
        """See ``Session``. Code that does not return to Python is not interrupted."""
        try:
            with alarm(seconds):
                yield
        finally:
            CARRIER.begin("")

    def home(self, case: Case, device: str) -> str:
        """See ``Session``. A small case of a GPU's kernel is on the CPU, which is faster than a thousand launches."""
        return CARRIER.home(case, device)

    def copies(self, inputs: Inputs) -> Inputs:
        """See ``Session``."""
        return copied(inputs)

    def run(self, surroundings: Surroundings) -> Run:
        """See ``Session``."""
        if CARRIER.device:
            return CarriedRun(self._implementation, surroundings, CARRIER)
        return LocalRun(self._implementation, surroundings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        configurations.ask("")


def copied(inputs: Inputs) -> Inputs:
    """Copies of ``inputs``, with what lies around each."""
    return inputs.each(partial(guard_bands.copy, pattern=guard_bands.NAN))


class Elsewhere(ABC):
    """The ``forward`` of an implementation whose code runs in another process."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session with that process, the same one each time."""


def session_of(implementation: Implementation) -> Session:
    """The session with the implementation's own process if it has one, else with this process."""
    entry = implementation.forward
    return entry.session if isinstance(entry, Elsewhere) else LocalSession(implementation)
