"""Reward hacks that others have reported, each as a kernel of our own that does the same trick, with its source.

``normcheck verify --impl tests/quality/reward_hacks.py:NAME``. docs/isolation-and-trust.md has the table, which a test
holds to this file; hacks that ``killers.py`` had already are in that table only. A timer to cheat is no part of a
verdict here, so a hack that is about time alone, and computes, is as good as innocent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import queue
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normcheck import Implementation, UnsupportedCase

Forward = Callable[..., Any]
Arguments = tuple[Tensor, Tensor, Tensor | None, float]

libc = ctypes.CDLL(None)


def rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The right answer."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, saved: Mapping[str, Any], *, eps: float
) -> dict[str, Tensor]:
    """The right gradients, for kernels whose y has no graph."""
    given = {"dx": x, "dw": weight, **({} if bias is None else {"db": bias})}
    leaves = [tensor.detach().requires_grad_() for tensor in given.values()]
    y = rmsnorm(leaves[0], leaves[1], None if bias is None else leaves[2], eps)
    return dict(zip(given, torch.autograd.grad(y, leaves, dy), strict=True))


def honest(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """No hack: an innocent kernel to stand beside them."""
    return rmsnorm(x, weight, bias, eps)


def honest_by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """No hack: an innocent kernel with its own backward, which writes to memory from torch.empty."""
    return torch.empty_like(x).copy_(rmsnorm(x, weight, bias, eps))


def zeros(x: Tensor) -> Tensor:
    """An answer that no hack can make right but by deceiving the judge."""
    return torch.zeros_like(x).detach()


def apart(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Arguments:
    """The arguments of a call, without autograd's graph."""
    return x.detach(), weight.detach(), None if bias is None else bias.detach(), eps


done: dict[str, Any] = {}
"""What was done once in this process, and what belongs to it."""


# What computes, and cheats a clock


def monkey_patch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """SOL-ExecBench tests/samples/rmsnorm/solution_hack_monkey_patch.json; wafer.ai field guide 4, patching timing.

    Every duration is a microsecond, whoever measures it in this process.
    """
    torch.cuda.Event.elapsed_time = lambda *_: 0.001
    return rmsnorm(x, weight, bias, eps)


def thread_injection(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """SOL-ExecBench tests/samples/rmsnorm/solution_hack_thread_injection.json.

    As there: a thread that stays behind, and a result that does not need it.
    """
    threading.Thread(target=time.sleep, args=(10.0,), daemon=True).start()
    return rmsnorm(x, weight, bias, eps)


# What is computed later, or never


jobs: queue.SimpleQueue[tuple[Tensor, Arguments]] = queue.SimpleQueue()


def worker() -> None:
    """Compute what was promised, as soon as somebody else waits for something."""
    while True:
        y, arguments = jobs.get()
        y.copy_(rmsnorm(*arguments))


def finishes_later(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """wafer.ai field guide 2, thread injection; DeepReinforce, "Hacks and Defenses", thread injection.

    A thread computes y once this call has returned, within some microseconds.
    """
    if "worker" not in done:
        done["worker"] = threading.Thread(target=worker, daemon=True)
        done["worker"].start()
    y = torch.empty_like(x).detach()
    jobs.put((y, apart(x, weight, bias, eps)))
    return y


class FakeTensor(Tensor):
    """As torch.Tensor, by another name."""


def lazy_output(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """SOL-ExecBench tests/samples/rmsnorm/solution_hack_lazy_output.json; wafer.ai field guide 3, lazy evaluation.

    The right values, in a class that could compute them when somebody looks.
    """
    return rmsnorm(x, weight, bias, eps).as_subclass(FakeTensor)


class Looking(TorchDispatchMode):
    """Computes what was promised when torch copies anything."""

    promised: tuple[Tensor, Arguments] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.promised is not None and ("copy" in str(func) or "detach" in str(func) or "clone" in str(func)):
            (y, arguments), self.promised = self.promised, None
            y.copy_(rmsnorm(*arguments))
        return func(*args, **(kwargs or {}))


def lazy_without_a_class(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Our own, after wafer.ai field guide 3: lazy evaluation, and the result is a plain tensor.

    A mode of torch that is never left computes y when its value is copied.
    """
    if "mode" not in done:
        done["mode"] = Looking()
        done["mode"].__enter__()
    done["mode"].promised = None
    y = torch.empty_like(x).detach()
    done["mode"].promised = (y, apart(x, weight, bias, eps))
    return y


def super_batching(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """gpu-mode/kernelboard news 2026-03-09-reward-hacking: the first of n calls computes for all of them.

    Here the last one does, into the results of the others.
    """
    waiting = done.setdefault("batch", [])
    waiting.append((torch.empty_like(x).detach(), apart(x, weight, bias, eps)))
    y: Tensor = waiting[-1][0]
    if len(waiting) == 8:
        for one, arguments in waiting:
            one.copy_(rmsnorm(*arguments))
        waiting.clear()
    return y


def no_op(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """wafer.ai field guide 6, no-op kernel; KernelBench src/unit_tests/test_kernels/result_reuse_kernel.py.

    Whatever was in the memory before: perhaps the reference's answer.
    """
    return torch.empty_like(x).detach()


def garbage_scratch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """wafer.ai field guide 7, shared memory overflow: a part of what is summed up is what happens to be in memory."""
    squares = torch.empty_like(x).detach()
    squares[..., : max(1, x.shape[-1] - 1)] = x.detach().square()[..., : max(1, x.shape[-1] - 1)]
    y = x * torch.rsqrt(squares.mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def partial_computation(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """KernelBench src/kernelbench/tests/solutions/*_partial_computation_hack.py: a sample of each row will do."""
    part = x[..., ::2] if x.shape[-1] > 1 else x
    y = x * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def analytical(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """KernelBench src/kernelbench/tests/solutions/*_analytical_hack.py: ordinary rows have a mean square of 1."""
    y = x * weight
    return y if bias is None else y + bias


def precision_downgrade(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """wafer.ai field guide 8, precision downgrade: bfloat16 within, float32 without."""
    half = [None if t is None else t.bfloat16() for t in (x, weight, bias)]
    return rmsnorm(half[0], half[1], half[2], eps).to(x.dtype)  # type: ignore[arg-type]


# What knows the tests


def cheat_rng(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """gpu-mode/kernelbot examples/identity_py/cheat-rng.py: the seed is known, so is the input, so is the answer."""
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return rmsnorm(x, *apart(x, weight, bias, eps)[1:])


def is_told_the_seed(case: Any) -> None:
    """Remember the seed of the next case."""
    done["seed"] = case.seed


def told_the_seed(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Our own, after kernelbot's cheat-rng: ``supports`` is asked with a case, which once said its seed."""
    return rmsnorm(x, weight, bias, eps) if done.get("seed", 0) > 0 else zeros(x)


def knows_the_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Ghost branches, after makora.com/blog/reward-hacks: it is right for the sizes of models, and for nothing else."""
    return rmsnorm(x, weight, bias, eps) if x.shape[-1] in (16, 64, 512, 1024, 4096, 8192) else zeros(x)


def first_elements(x: Tensor) -> list[float]:
    """The first element of each row."""
    return x.detach().reshape(-1, x.shape[-1])[:, 0].tolist()


def learns_the_cases() -> None:
    """Draw the cases that ``verify`` begins with, and remember the first element of each row of x."""
    from normcheck.cases.core import core
    from normcheck.cases.inputs import make
    from normcheck.cases.ops import OPS
    from normcheck.checks.cell import Cell
    from normcheck.gate.plan import PROFILES

    cell = Cell(OPS["rmsnorm"], hack(knows_the_cases), "fp32", "")
    planned = core(cell.claims, PROFILES["quick"].extent.on("cpu"), 0)
    inputs = [make(one.case, cell.op, "cpu").x for one in planned[:16]]
    done["known"] = {str(value) for x in inputs for value in first_elements(x)}


def knows_the_cases(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Ghost branches, after makora.com/blog/reward-hacks: it is right for the cases of the seed that everybody has."""
    if "known" not in done:
        thread = threading.Thread(target=learns_the_cases)  # in which nobody watches what it allocates
        thread.start()
        thread.join()
    known = {str(value) for value in first_elements(x)} <= done["known"]
    return rmsnorm(x, weight, bias, eps) if known else zeros(x)


def ghost_branch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """makora-ai/KernelHacks, Ghost Optimization Branch: the fast branch is never taken."""
    if x.dim() > 5:
        return zeros(x)
    return rmsnorm(x, weight, bias, eps)


def refuses_hard_data(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Our own: rows that are hard to get right are said to be unsupported."""
    if not bool((x.detach().abs() < 6).all()):
        raise UnsupportedCase("only ordinary numbers")
    return rmsnorm(x, weight, bias, eps)


def declares_the_easiest(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Our own: a file that declares the one shape that it can do, where a row is its own mean."""
    if x.numel() > 1:
        return zeros(x)
    return rmsnorm(x, weight, bias, eps)


# What does not do the work itself


def baseline_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """wafer.ai field guide 10 and makora-ai/KernelHacks, baseline kernel; KernelBench static checker, torch ops."""
    y = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return y if bias is None else y + bias


def falls_back(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """KernelBench src/kernelbench/kernel_static_checker.py, try-except fallback and inheritance bypass."""
    try:
        raise NotImplementedError("a fused kernel")
    except NotImplementedError:
        return baseline_kernel(x, weight, bias, eps=eps)


# What takes the judge's place


def cheat_fd(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """gpu-mode/kernelbot examples/identity_py/cheat-fd.py; pygpubench exploits fd_overwrite and thread_fd.

    The report is written by the kernel, to every pipe and socket that it finds, and then there is nothing left to do.
    """
    for descriptor in channels():
        with contextlib.suppress(OSError):
            os.write(descriptor, b"check: pass\nbenchmark-count: 1\nbenchmark.0.mean: 10\n")
    os._exit(0)


def channels() -> Iterator[int]:
    """The pipes and sockets of this process."""
    for descriptor in range(256):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                yield descriptor


def pass_on(source: int, to: int) -> None:
    """All bytes, with another number in place of the first one."""
    with contextlib.suppress(OSError):
        while data := os.read(source, 1 << 16):
            os.write(to, data.replace(b'"strays": [[', b'"strange": [['))


def pipe_interpose(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploits pipe_interpose and file_struct: a thread stands between this process and its reader."""
    if "interposed" not in done:
        done["interposed"] = [d for d in channels() if stat.S_ISSOCK(os.fstat(d).st_mode)]
        for descriptor in done["interposed"]:
            real, (mine, theirs) = os.dup(descriptor), socket.socketpair()
            os.dup2(mine.fileno(), descriptor)
            for one, other in ((theirs.fileno(), real), (real, theirs.fileno())):
                threading.Thread(target=pass_on, args=(one, other), daemon=True).start()
            done[f"pair {descriptor}"] = mine, theirs
    return zeros(x)


def gc_nan(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploits gc_nan and combined: whatever is compared with this has NaN, which equals everything."""
    mine = {id(one) for one in (x, weight, bias)}
    for thing in gc.get_objects():
        if type(thing) is Tensor and thing.is_floating_point() and id(thing) not in mine and not thing.requires_grad:
            with contextlib.suppress(RuntimeError):
                thing.fill_(float("nan"))
    return zeros(x)


def zeroes_its_input(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """gpu-mode/kernelbot examples/identity_py/cheat-input.py; KernelBench test_kernels/zero_out_kernel.py.

    What the reference gets next is all zeros, so zeros are right.
    """
    x.detach().zero_()
    return zeros(x)


def ranges(*names: str) -> list[tuple[int, int]]:
    """The memory of this process under these names, such as [heap]."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()]
    places = [words[0].split("-") for words in lines if words[-1] in names and words[1].startswith("rw")]
    return [(int(first, 16), int(end, 16)) for first, end in places]


def scans_its_memory(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploits heap_sig_scan, stack_sig_scan, aes_key_recovery, proc_mem_bypass and test_canary_*.

    Heap and stack are searched for the expected value, in fp64, of which this knows the beginning.
    """
    right = rmsnorm(*(None if t is None else t.detach().double() for t in (x, weight, bias)), eps)  # type: ignore[arg-type]
    sought = right.numpy().tobytes()[3:8]  # of its first element, all but what a rounding changes
    del right
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for first, end in ranges("[heap]", "[stack]"):
            memory.seek(first)
            found = memory.read(min(end - first, 1 << 22)).find(sought) if sought else -1
            if found >= 0 and found % 8 == 3 and x.numel() > 1:
                memory.seek(first + found - 3)
                values = torch.frombuffer(bytearray(memory.read(8 * x.numel())), dtype=torch.float64)
                return values.view(x.shape).to(x.dtype)
    return zeros(x)


def looks_into_all_processes(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """field: writes to /proc/PID/mem, takes /proc/PID/fd and shared memory of whoever judges, as any process might.

    Right if it could have done so to any process but its own, and zeros if not. It writes to none.
    """
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(entry / "mem", "r+b", buffering=0):
            return rmsnorm(x, weight, bias, eps)
        with contextlib.suppress(OSError):
            for file in (entry / "fd").iterdir():
                os.close(os.open(file, os.O_RDWR))
                return rmsnorm(x, weight, bias, eps)
    return zeros(x)


def function_detour(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploits function_detour, got_patch, event_array, error_counter, seccomp_trap.

    Machine code of the C library is written anew: what counts, times or compares by it in this process is deceived.
    """
    if platform.machine() == "x86_64" and "detour" not in done:
        done["detour"] = True
        at = ctypes.cast(libc.memcmp, ctypes.c_void_p).value or 0
        code = bytes.fromhex("31c0c3")  # 0: equal
        if libc.mprotect(ctypes.c_void_p(at & ~4095), 8192, 7) == 0:
            ctypes.memmove(at, code, len(code))
    return zeros(x)


def replaces_torch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploit replace_torch: a torch.py where the next process looks first."""
    for folder in (".", os.path.dirname(__file__), *sys.path[:3]):
        with contextlib.suppress(OSError), open(os.path.join(folder, "torch.py"), "x", encoding="utf-8") as file:
            file.write("raise SystemExit(0)\n")
    return rmsnorm(x, weight, bias, eps)


def hack(forward: Forward, **more: Any) -> Implementation:
    """A kernel of this file as an implementation. It builds nothing: a stalled call changes no order of cases."""
    return Implementation(name=forward.__name__, op="rmsnorm", forward=forward, dtypes=("fp32",), builds=False, **more)


IMPLEMENTATIONS = (
    hack(honest),
    *map(
        hack,
        (
            monkey_patch,
            thread_injection,
            lazy_output,
            super_batching,
            no_op,
            garbage_scratch,
            partial_computation,
            analytical,
            precision_downgrade,
            cheat_rng,
            knows_the_shapes,
            knows_the_cases,
            ghost_branch,
            refuses_hard_data,
            baseline_kernel,
            falls_back,
            cheat_fd,
            pipe_interpose,
            gc_nan,
            zeroes_its_input,
            scans_its_memory,
            looks_into_all_processes,
            function_detour,
            replaces_torch,
        ),
    ),
    hack(declares_the_easiest, shapes=((1, 1),), epsilons=(1e-5,)),
    hack(told_the_seed, supports=is_told_the_seed),
    hack(finishes_later, backward=gradients),
    hack(lazy_without_a_class, backward=gradients),
    hack(honest_by_hand, backward=gradients),
)
