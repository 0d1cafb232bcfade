"""Contexts of threads: two that call at once, one that is not the main one, several of torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Barrier, Thread
from typing import TypeVar

import torch
from torch import Tensor

from normcheck.cases.inputs import Inputs
from normcheck.contexts.kernel import Kernel, NotTried, Step, both, copied

_ROUNDS = 10
_SWITCH_SECONDS = 1e-5  # Python's threads take turns so often, where they usually do each 5 ms
_TORCH_THREADS = 3

Results = dict[str, Tensor]
T = TypeVar("T")


def thread(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Two threads at once with ``first`` and ``second``, started together, several times; each has both by turns."""
    if kernel.one_at_a_time:
        raise NotTried(kernel.one_at_a_time)
    start = Barrier(2)

    def work(by_turns: tuple[Inputs, Inputs]) -> list[Results]:
        each = [copied(by_turns[number % 2]) for number in range(_ROUNDS)]
        found = []
        for own in each:
            start.wait()
            found.append(both(kernel, own))
        return found

    with _taking_turns():
        begun = [_begun(work, by_turns) for by_turns in ((first, second), (second, first))]
        done = [future.result() for future in begun]
    for begins_with, results in enumerate(done):
        for number, found in enumerate(results):
            yield Step("while another thread calls it", ((begins_with + number) % 2,), found)


def _begun(work: Callable[[T], list[Results]], inputs: T) -> Future[list[Results]]:
    """``work`` in a thread that no process waits for at its end: it may hang."""
    future: Future[list[Results]] = Future()

    def run() -> None:
        torch.get_num_threads()  # until that is asked, a product of matrices takes all cores here, and has other bits
        try:
            future.set_result(work(inputs))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


@contextmanager
def _taking_turns() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def threads(kernel: Kernel, first: Inputs, second: Inputs) -> Iterator[Step]:
    """Called from another thread than the main one, with one torch thread, as in eager mode, and with several."""

    def elsewhere() -> Results:
        return _begun(lambda inputs: [both(kernel, copied(inputs))], first).result()[0]

    usual = torch.get_num_threads()
    yield Step("when another thread than the main one calls it", (0,), elsewhere(), exact=usual == 1)
    torch.set_num_threads(_TORCH_THREADS)
    try:
        yield Step(f"with {_TORCH_THREADS} torch threads", (0,), both(kernel, copied(first)), exact=False)
        yield Step(f"from another thread, with {_TORCH_THREADS} torch threads", (0,), elsewhere(), exact=False)
    finally:
        torch.set_num_threads(usual)
