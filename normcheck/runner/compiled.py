"""torch.compile in a kernel's process: what it asks and how often, and the functions that it ran as they are.

After eight recompilations of a function torch runs it without compiling it, and says so in a log alone: what is judged
then is not what was compiled. Nothing here imports torch._dynamo, which takes seconds: a kernel that compiles has.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sized
from contextlib import contextmanager
from typing import Any

_MOST = 1 << 20  # more than a process has cases


def prepare(*, on_gpu: bool) -> None:
    """Let torch.compile recompile a function as often as its calls need, if this process has it imported.

    In a graph for a GPU its kernels for the CPU compute a scalar, such as an eps that is new. Before the first of them
    it compiles a test for each set of vector instructions, and runs it in a process that imports torch: 30 s on a
    host with AMX, of which ``sandbox`` can answer no more than the plain sets. There the answer is no.
    """
    config = sys.modules.get("torch._dynamo.config")
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if config is not None and 0 <= getattr(config, name, -1) < _MOST:
            setattr(config, name, _MOST)
    vectors = getattr(sys.modules.get("torch._inductor.cpu_vec_isa"), "VecISA", None)
    if on_gpu and vectors is not None:
        vectors.check_build = _no


def _no(vectors: object, code: str) -> bool:
    return False


def graphs() -> int:
    """How many graphs torch.compile has compiled in this process, those of ``fullgraph=True`` as well."""
    return _counted("stats", "unique_graphs")


def built() -> int:
    """How many kernels Triton has compiled in this process, and how often it has tuned one; and ``graphs``."""
    jit, autotuner = (sys.modules.get(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    if jit is None or autotuner is None:
        return graphs()
    kinds = jit.JITFunction, autotuner.Autotuner
    return graphs() + sum(map(_built, [each for each in gc.get_objects() if issubclass(type(each), kinds)]))


def _built(kernel: Any) -> int:
    """The entries of a Triton kernel's caches: of its compilations, on each device, or of its tunings."""
    caches = getattr(kernel, "device_caches", None)
    if caches is not None:
        return sum(len(of_device[0]) for of_device in caches.values())
    return len(kernel.cache) if isinstance(kernel.cache, Sized) else 0  # another's tuner may keep its own in a file


def eager_calls() -> int:
    """How often torch.compile was to compile a function in this process, and ran it as it is."""
    return _counted("frames", "total") - _counted("frames", "ok")


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing that torch.compile does in the block: normcheck has it compile, and not the kernel."""
    before = {of: dict(_counts(of)) for of in ("stats", "frames")}
    try:
        yield
    finally:
        for of, counts in before.items():
            now = _counts(of)
            now.clear()
            now.update(counts)


def _counted(of: str, what: str) -> int:
    return int(_counts(of).get(what, 0))


def _counts(of: str) -> MutableMapping[str, int]:
    """torch._dynamo's own counter."""
    counters: Mapping[str, MutableMapping[str, int]] = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return counters.get(of, {})
