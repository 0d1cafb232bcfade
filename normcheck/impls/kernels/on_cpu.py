"""What published Triton kernels ask of a GPU beside their arithmetic, answered on a machine without one.

They are autotuned, call libdevice, take ``eps`` as a number that has ``to``, and ask how many multiprocessors there
are, or write "cuda" for the device of a buffer. None of this is in Triton's interpreter, and none is a fault of
theirs. What a kernel computes stays its own.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from normcheck.errors import UnsupportedCase
from normcheck.impls.kernels import configurations

_MULTIPROCESSORS, _WARP = 4, 32
"""Few, so that a kernel whose programs take several rows each does so on few rows."""

_CAPABILITY = (9, 0)

_GPU = re.compile(r"cuda(:\d+)?")
_MAY_NAME_A_GPU = (str, torch.device)

_STATE = SimpleNamespace(without_gpu=False, told=set())
"""``without_gpu``: whether torch.cuda is answered for. ``told``: the packages that asked whether there is a GPU."""

_ERF = np.vectorize(math.erf, otypes=[np.float64])

LIBDEVICE: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "rsqrt_rn": lambda a: 1 / np.sqrt(a),
    "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt,
    "rcp_rn": lambda a: 1 / a,
    "div_rn": np.divide,
    "fast_dividef": np.divide,
    "fma": lambda a, b, c: a * b + c,
    "fma_rn": lambda a, b, c: a * b + c,
    "abs": np.abs,
    "tanh": np.tanh,
    "fast_tanhf": np.tanh,
    "exp": np.exp,
    "fast_expf": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "fast_logf": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "pow": np.power,
    "fast_powf": np.power,
    "erf": _ERF,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "nearbyint": np.rint,
}
"""Functions of libdevice, computed in fp64 and rounded once."""


def answer(interpreter: Any, tl: Any) -> None:
    """Answer from now on. ``interpreter``, ``tl``: triton's modules. Raises AttributeError if a place is missing."""
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as of_cuda
    from triton.runtime import driver

    configurations.install(interpreted=True)
    interpreter._implicit_cvt = _with_floats(interpreter._implicit_cvt, interpreter, tl)
    computed = {name: _on_tensors(name, compute, interpreter, tl) for name, compute in LIBDEVICE.items()}
    for module in (libdevice, of_cuda):
        _compute(module, computed)
    driver.set_active(_driver())
    _answer_for_cuda()


def without_gpu(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    """A call of a function of torch, with the CPU for each GPU that it names where ``answer`` answers for one."""
    if not _STATE.without_gpu:
        return function, args, kwargs
    if function is torch.Tensor.cuda:
        return torch.Tensor.cpu, args[:1], {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, _MAY_NAME_A_GPU):
            return function, tuple(map(_cpu_for_gpu, args)), {name: _cpu_for_gpu(arg) for name, arg in kwargs.items()}
    return function, args, kwargs


def answers_for_a_gpu() -> bool:
    """Whether ``without_gpu`` changes any call."""
    return bool(_STATE.without_gpu)


def because_of_no_gpu(error: BaseException) -> str:
    """Words on an error of code that had asked whether there is a GPU, to follow its message; "" for any other."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    package = "" if traceback is None else _package(traceback.tb_frame)
    return f" (torch.cuda.is_available() told {package} that there is no GPU)" if package in _STATE.told else ""


def _with_floats(convert: Callable[[Any], Any], interpreter: Any, tl: Any) -> Callable[[Any], Any]:
    """A float is an fp32 scalar, as on a GPU; the interpreter leaves it a number of Python."""

    @functools.wraps(convert)
    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    return converted


def _compute(module: ModuleType, computed: Mapping[str, Callable[..., Any]]) -> None:
    """Have a module of libdevice's functions compute, and every copy of it that is loaded beside it.

    Those that cannot be computed refuse: left alone they return None, and a kernel is told of what it did with that.
    """
    loader: Any = module.__spec__.loader if module.__spec__ else None
    load = loader.exec_module

    def replaced(copy: ModuleType) -> None:
        own = {name for name, f in vars(copy).items() if inspect.isfunction(f) and f.__module__ == copy.__name__}
        vars(copy).update({name: computed.get(name) or _refused(name) for name in own | {*computed}})

    def loaded(copy: ModuleType) -> None:
        load(copy)
        replaced(copy)

    replaced(module)
    loader.exec_module = loaded


def _refused(name: str) -> Callable[..., Any]:
    def called(*_: Any, **__: Any) -> Any:
        raise UnsupportedCase(f"libdevice.{name} runs on a GPU only: normcheck does not compute it on a CPU")

    called.__name__ = name
    return called


def _on_tensors(name: str, compute: Callable[..., Any], interpreter: Any, tl: Any) -> Callable[..., Any]:
    """A function of libdevice on tensors of the interpreter, of fp32 or fp64."""

    def called(*args: Any, **_: Any) -> Any:
        given = [arg if isinstance(arg, tl.tensor) else interpreter._implicit_cvt(float(arg)) for arg in args]
        dtype = next((arg.dtype for arg in given if arg.dtype == tl.float64), tl.float32)
        if any(arg.dtype not in (tl.float32, tl.float64) for arg in given):
            raise TypeError(f"libdevice.{name} of {', '.join(str(arg.dtype) for arg in given)}: expected fp32 or fp64")
        with np.errstate(all="ignore"):
            wide = compute(*(np.asarray(arg.handle.data, dtype=np.float64) for arg in given))
        data = np.asarray(wide).astype(np.float64 if dtype == tl.float64 else np.float32)
        shaped = max(given, key=lambda arg: arg.handle.data.size)
        return tl.tensor(interpreter.TensorHandle(data, dtype), shaped.type.with_element_ty(dtype))

    called.__name__ = name
    return called


def _driver() -> Any:
    """What kernels ask of Triton's driver."""
    from triton.backends.compiler import GPUTarget

    properties = {"multiprocessor_count": _MULTIPROCESSORS, "warpSize": _WARP, "max_shared_mem": 232448}
    properties |= {"max_num_regs": 65536, "sm_clock_rate": 1980000, "mem_clock_rate": 3201000, "mem_bus_width": 6144}
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * _CAPABILITY[0] + _CAPABILITY[1], _WARP),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=_cpu,
        utils=SimpleNamespace(get_device_properties=lambda device=None: properties),
    )


def _cpu() -> Any:
    return torch.device("cpu")


def _answer_for_cuda() -> None:
    """What kernels ask of torch.cuda, which raises without a GPU. ``is_available`` still says no."""
    if torch.cuda.is_available():
        return
    properties = SimpleNamespace(
        name="Triton's interpreter",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=_MULTIPROCESSORS,
        warp_size=_WARP,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        total_memory=80 << 30,
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_name": lambda device=None: properties.name,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
    }
    for name, function in answers.items():
        setattr(torch.cuda, name, _but_for_torch(getattr(torch.cuda, name), function))
    torch.cuda.is_available = _noting_who_asks(torch.cuda.is_available)
    for name in ("device", "device_of"):
        setattr(torch.cuda, name, type(name, (getattr(torch.cuda, name),), _NOWHERE))
    _STATE.without_gpu = True


_NOWHERE: dict[str, Callable[..., None]] = {
    "__init__": lambda self, device: None,
    "__enter__": lambda self: None,
    "__exit__": lambda self, *raised: None,
}
"""The methods of a context that switches to no device."""


def _but_for_torch(original: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    """``answer``; torch itself gets the ``original``, since it must not take the machine for one with a GPU."""

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return (original if _package(sys._getframe(1)) == "torch" else answer)(*args, **kwargs)

    return asked


def _noting_who_asks(is_available: Callable[[], bool]) -> Callable[[], bool]:
    """It still says no: who hears yes moves tensors to a GPU. What is raised for that is told with this reason."""

    @functools.wraps(is_available)
    def asked() -> bool:
        _STATE.told.add(_package(sys._getframe(1)))
        return is_available()

    return asked


def _package(frame: Any) -> str:
    """The package, or the module outside of any, whose code runs in ``frame``."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _cpu_for_gpu(value: Any) -> Any:
    if isinstance(value, str):
        return "cpu" if _GPU.fullmatch(value) else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
