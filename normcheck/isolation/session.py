"""Session with a kernel in a worker process: the one owner of that process, from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType, TracebackType
from typing import Any, Self

from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs
from normcheck.impls.kernels.configurations import Configuration
from normcheck.isolation import forkserver
from normcheck.isolation.client import START_SECONDS, Client
from normcheck.isolation.remote_run import RemoteRun
from normcheck.isolation.replies import nonsense, raise_failure
from normcheck.isolation.sandbox import Sandbox
from normcheck.isolation.turn import turn
from normcheck.runner.arena import Surroundings
from normcheck.runner.session import FIRST_CALLS, copied


class ProcessSession:
    """See ``runner.session.Session``. A call outside ``with`` starts the process as well, but only ``with`` ends it.

    ``by_autograd``: gradients come from torch autograd through y. ``start_seconds``: see ``Client``. ``python``: the
    interpreter of the process, see ``forkserver``; ``environment``: see ``Implementation``. A pickled
    copy has a worker of its own.
    """

    isolated = True

    def __init__(
        self,
        spec: str,
        op: str,
        name: str,
        device: str,
        by_autograd: bool,
        sandbox: Sandbox | None = None,
        start_seconds: float = START_SECONDS,
        python: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        own = dict(environment)
        self._arguments = (spec, op, name, device, by_autograd, sandbox, start_seconds, python, own)
        self._client = Client(spec, op, name, device, sandbox, start_seconds, python, own)
        self._by_autograd, self._python = by_autograd, python
        self._runs = 0

    def __reduce__(self) -> tuple[type[ProcessSession], tuple[Any, ...]]:
        """Pickle the arguments of this session only, not its worker."""
        return ProcessSession, self._arguments

    def __enter__(self) -> Self:
        self._client.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._client.end()
        self.configure("")

    def start(self) -> None:
        """See ``Session``."""
        self._client.start()

    def count_calls_of(self, other: ProcessSession) -> None:
        """Count the calls of another process of the same kernel as calls of this one."""
        self._client.idle_seconds += other.idle_seconds
        self._client.eager_calls = max(self.eager_calls, other.eager_calls)
        self._client.graphs = max(self.graphs, other.graphs)

    def restart(self, *, cleanly: bool = False) -> None:
        """See ``Session``; ``cleanly``: from a new server, which no code under test can have reached."""
        self._client.close()
        if cleanly:
            forkserver.replace(self._python)

    @property
    def running(self) -> bool:
        """Whether the process is there: on entry it is not if it could not import the kernel."""
        return self._client.alive

    @property
    def idle_seconds(self) -> float:
        """See ``Session``."""
        return self._client.idle_seconds

    @property
    def waited_seconds(self) -> float:
        """Seconds for which its answers were waited for, but for first calls."""
        return self._client.waited_seconds

    @property
    def eager_calls(self) -> int:
        """See ``Session``."""
        return self._client.eager_calls

    @property
    def graphs(self) -> int:
        """See ``Session``."""
        return self._client.graphs

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """See ``Session``."""
        return self._client.configurations

    def configure(self, configuration: str) -> None:
        """See ``Session``."""
        self._client.asked, self._client.configurations = configuration, ()

    @property
    def before(self) -> tuple[Case, ...]:
        """See ``Session``."""
        return self._client.before

    @contextmanager
    def case(self, case: Case, seconds: float, first_calls: float = FIRST_CALLS) -> Iterator[None]:
        """See ``Session``; the process is killed if it takes longer.

        A case that needs much of a GPU's memory waits for its turn.
        """
        with ExitStack() as ended:
            self._client.begin(case, seconds, first_calls)
            if self._client.alone:
                ended.enter_context(turn())
                ended.callback(self._client.finish)
            yield

    def home(self, case: Case, device: str) -> str:
        """See ``Session``. A small case of a GPU's kernel stays on the CPU.

        On a GPU it takes some thousand launches to make, compare and judge it. They take longer than its judging on a
        CPU, and every wait for them is a change from process to process, of which a GPU runs only one at a time.
        """
        return "cpu" if case.small else device

    def copies(self, inputs: Inputs) -> Inputs:
        """See ``Session``; those of a huge case lie in shared memory, so that there is one copy less."""
        return self._client.hold(inputs) if self._client.alone else copied(inputs)

    def run(self, surroundings: Surroundings) -> RemoteRun:
        """See ``Session``."""
        self._runs += 1
        return RemoteRun(self._client, self._runs, surroundings, by_autograd=self._by_autograd)

    def ask(self, what: str, case: Case) -> Any:
        """Call the implementation's ``what``, "supports" or "model", on a case. Raises Broken, UnsupportedCase.

        "touched" asks the process itself what the code in it has done to torch, see ``intact.torch_as_it_is``.
        """
        self._client.post({"do": what, "case": str(case)})
        answer = self._client.collect()
        raise_failure(answer)
        if "value" not in answer:
            raise nonsense(what, answer)
        return answer["value"]
