"""Which of its configurations a Triton autotuner takes, in the kernel's own process: the one that is asked for.

Asked for is the same number of every tuner, or of the one tuner of a kernel. A tuner that has no such configuration, or
rules it out for these arguments, takes the first one that it allows. Nothing is timed meanwhile.

If none is asked for, a tuner times its configurations as ever, but in a process of kernels it does so briefly: each is
judged, so that it matters little which one wins, and a tenth of a second for each and for every new shape would leave
no time for shapes.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

from normcheck.json_types import Count

_MOST_TEXT = 300  # characters of a configuration, and of why it cannot be launched

_TIMED_CALLS = 5  # of which the fastest counts, after one that compiles

_STATE = SimpleNamespace(asked="", kernel="", number=-1, interpreted=False, brief=False, seen={})
"""``asked``: see ``ask``; ``kernel``, ``number``: its parts. ``interpreted``: tuners time nothing at all here;
``brief``: they do so with a few calls."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Configuration ``number`` of ``kernel``, from 0 in the order in which its tuner lists them, as Triton prints it.

    ``blocks``: its integers that may be the size of a block. ``taken``: whether a call has taken it since it was asked
    for. ``why``: why it cannot be launched; "" if it can, or if that is not known.
    """

    kernel: str
    number: Count
    text: str = ""
    blocks: tuple[Count, ...] = ()
    taken: bool = False
    why: str = ""

    @property
    def name(self) -> str:
        """What ``ask`` takes for it alone."""
        return f"{self.kernel}:{self.number}"


def parts(text: str) -> tuple[str, int]:
    """The kernel, "" for all, and the number in ``[KERNEL:]NUMBER``. Raises ValueError("VALUE: expected ...")."""
    match = re.fullmatch(r"(?:(\w{1,200}):)?([0-9]{1,6})", text)
    if match is None:
        raise ValueError(f"{text[:60]}: expected NUMBER or KERNEL:NUMBER, from 0, as in a finding's line to paste")
    return match[1] or "", int(match[2])


def ask(text: str) -> None:
    """Have every tuner take configuration ``[KERNEL:]NUMBER`` from now on; with "" none is asked for any more."""
    if text != _STATE.asked:
        _STATE.asked, _STATE.seen = text, {}
        _STATE.kernel, _STATE.number = parts(text) if text else ("", -1)
    is_known = bool(_STATE.kernel) or _STATE.number > 0  # that there is a tuner, which a new process may not have yet
    if (text and is_known) or ((text or _STATE.brief) and "triton.runtime.autotuner" in sys.modules):
        install()


def tune_briefly() -> None:
    """Have tuners time each configuration with a few calls from now on: this process judges kernels, and times none."""
    _STATE.brief = True


def seen() -> tuple[Configuration, ...]:
    """Those that the tuners called since then allowed."""
    return tuple(_STATE.seen.values())


def told() -> list[dict[str, Any]]:
    """``seen``, for a message to another process."""
    return list(map(asdict, seen()))


def install(*, interpreted: bool = False) -> None:
    """Have Triton's tuners obey ``ask``. ``interpreted``: none ever times anything, as that would tell nothing there.

    Without Triton nothing happens, as there are no tuners. Raises AttributeError if Triton has another one.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    _STATE.interpreted |= interpreted
    if not hasattr(Autotuner.run, "__wrapped__"):
        Autotuner.run = _obedient(Autotuner.run)


def _obedient(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def obedient(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = tuner.base_fn.__name__
        if len(tuner.configs) < 2:
            return run(tuner, *args, **kwargs)
        if _STATE.brief:
            _shorten(tuner)
        if not _STATE.asked or _STATE.kernel not in ("", kernel):
            return _usual(run, tuner, args, kwargs)
        allowed = _allowed(tuner, args, kwargs)
        for number, config in allowed.items():
            _STATE.seen.setdefault((kernel, number), _described(kernel, number, config))
        chosen = _STATE.number if _STATE.number in allowed else next(iter(allowed))
        own = _STATE.seen[kernel, chosen]
        try:
            with _alone(tuner, allowed[chosen]):
                returned = run(tuner, *args, **kwargs)
        except _unlaunchable() as error:
            why = f"{type(error).__name__}: {error}".replace("\n", " ")[:_MOST_TEXT]
            _STATE.seen[kernel, chosen] = replace(own, why=why)
            return _usual(run, tuner, args, kwargs)
        if chosen == _STATE.number:
            _STATE.seen[kernel, chosen] = replace(own, taken=True)
        return returned

    return obedient


def _usual(run: Callable[..., Any], tuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call for which none is asked for; an interpreted one takes the first that the kernel does not rule out."""
    if not _STATE.interpreted:
        return run(tuner, *args, **kwargs)
    every = tuner.configs
    if tuner.early_config_prune:
        every = tuner.early_config_prune(every, dict(zip(tuner.arg_names, args, strict=False)), **kwargs)
    with _alone(tuner, *every[:1]):
        return run(tuner, *args, **kwargs)


def _shorten(tuner: Any) -> None:
    """Have the tuner time by ``_time_of``, unless it does so by the user's own function or by a graph.

    What it finds is not kept for other processes, in which more may hang on it.
    """
    is_plain = tuner._do_bench is None or tuner.num_warmups is not None or tuner.num_reps is not None
    if is_plain and not tuner.use_cuda_graph:
        tuner.do_bench, tuner.cache_results = _time_of, False


def _time_of(call: Callable[[], Any], quantiles: Sequence[float] | None = None) -> float | list[float]:
    """Milliseconds of the GPU for a ``call``, the least of a few; as often as there are ``quantiles``."""
    from torch.cuda import Event, synchronize

    call()
    event: Callable[..., Any] = Event
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(_TIMED_CALLS)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    synchronize()
    least = min(begin.elapsed_time(end) for begin, end in events)
    return least if quantiles is None else [least] * len(quantiles)


def _allowed(tuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
    """Number -> configuration, for those that the kernel does not rule out for these arguments."""
    every = list(tuner.configs)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        left = list(tuner.prune_configs(kwargs))
    except Exception:
        if not (_STATE.interpreted and tuner.perf_model):
            raise
        left = every  # it models a GPU, and there is none
        if tuner.early_config_prune:
            left = list(tuner.early_config_prune(every, tuner.nargs, **kwargs))
    own = {number: config for number, config in enumerate(every) if config in left}
    made = [config for config in left if config not in every]  # by the kernel, for these arguments
    return own | dict(enumerate(made, len(every)))


@contextmanager
def _alone(tuner: Any, *configs: Any) -> Iterator[None]:
    every, tuner.configs = tuner.configs, list(configs)
    try:
        yield
    finally:
        tuner.configs = every


def _described(kernel: str, number: int, config: Any) -> Configuration:
    blocks = tuple(value for value in config.kwargs.values() if type(value) is int and value > 0)
    return Configuration(kernel=kernel, number=number, text=str(config)[:_MOST_TEXT], blocks=blocks)


def _unlaunchable() -> tuple[type[Exception], ...]:
    """What a tuner itself takes as a reason to leave a configuration out."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError, CompileTimeAssertionFailure
