"""Find implementations by name, here and in users' files. Modules declare, discovery reads; no list is edited."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import rules
from normcheck.cases.dtypes import DTYPES, named
from normcheck.cases.ops import OPS, with_residual
from normcheck.cases.tensor_names import RESIDUAL_GATE
from normcheck.errors import ImportFailed, UsageError, error_text, one_line, one_of, shown
from normcheck.impls import _hub
from normcheck.impls.implementation import Implementation, NotImported

if TYPE_CHECKING:
    from normcheck.impls.adapt import Adapted

_PACKAGE = "__init__.py"

LONGEST_NAME = 200
"""Characters of an implementation's name, which is in every report."""


def modules(package: str) -> Iterator[ModuleType]:
    """The public modules of one of this project's packages, in order of name."""
    path = importlib.import_module(package).__path__
    for info in sorted(pkgutil.iter_modules(path), key=lambda info: info.name):
        if not info.name.startswith("_"):
            yield importlib.import_module(f"{package}.{info.name}")


@cache
def implementations() -> dict[str, tuple[Implementation, ...]]:
    """Name of a known implementation -> its ops."""
    found: dict[str, tuple[Implementation, ...]] = {}
    for module in modules("normcheck.impls"):
        for implementation in getattr(module, "IMPLEMENTATIONS", ()):
            found[implementation.name] = (*found.get(implementation.name, ()), implementation)
    return found


def by_default(device: str, op_names: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """What is checked on ``device`` if no implementation is named: name -> its ops, of ``op_names`` (empty: all)."""
    chosen = {
        name: tuple(i.op for i in found if device in i.by_default and (not op_names or i.op in op_names))
        for name, found in implementations().items()
    }
    return {name: found for name, found in chosen.items() if found}


def select(spec: str, op_names: Sequence[str]) -> tuple[Implementation, ...]:
    """The implementations that ``--impl spec`` names, for the ops asked for (empty: all that it declares).

    ``spec``: a known name, ``file.py``, ``file.py:name``, ``package.module:name`` or ``hub:owner/name:layer``. Raises
    UsageError.
    """
    spec = _hub.local(spec)
    found = implementations().get(spec) or _from_user(spec, op_names)
    asked = {*op_names, *(with_residual(op, (RESIDUAL_GATE,)) for op in op_names)}
    wanted = tuple(i for i in found if not op_names or i.op in op_names)
    if not wanted and spec not in implementations():  # a modulated norm that takes a residual is the op that adds it
        wanted = tuple(i for i in found if i.op in asked)
    if not wanted:
        declared = sorted({i.op for i in found})
        raise UsageError(f"op={','.join(op_names)}: expected {one_of(declared)}, which are what impl={spec} declares")
    return wanted


def not_imported(spec: str, op_names: Sequence[str], error: ImportFailed) -> tuple[Implementation, ...]:
    """What stands for the implementations of ``spec``, which could not be imported: to ask about them raises that."""
    name = Path(spec.rpartition(":")[0] or spec).name
    ops = op_names or tuple(OPS)[:1]
    return tuple(Implementation(name=name, op=op, forward=NotImported(error), source=spec) for op in ops)


def looked_at(spec: str, op_names: Sequence[str]) -> None:
    """Raise the UsageError of ``select`` that needs no import of what ``spec`` names."""
    if spec in implementations():
        select(spec, op_names)
        return
    if spec.startswith(_hub.PREFIX):
        _hub.parts(spec)
        return
    location, _ = _parts(spec)
    if location.endswith(".py"):
        _require_file(Path(location))


def _parts(spec: str) -> tuple[str, str]:
    """File or module, and the name in it or "", of a spec that is no known name."""
    location, colon, name = spec.rpartition(":")
    if not colon or spec.endswith(".py"):
        location, name = spec, ""
    if not (name or location.endswith(".py")):
        if os.path.isdir(location):
            raise UsageError(f"impl={spec}: is a folder, expected a Python file in it: FILE.py or FILE.py:NAME")
        forms = (
            "a known name ("
            + ", ".join(implementations())
            + "), FILE.py, FILE.py:NAME, MODULE:NAME or hub:OWNER/NAME:LAYER"
        )
        raise UsageError(f"impl={spec}: expected {forms}")
    return location, name


def _from_user(spec: str, op_names: Sequence[str]) -> tuple[Implementation, ...]:
    location, name = _parts(spec)
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    declared = _declared(module, spec)
    if not name:
        named_as_ops = [(op, f) for op in OPS if (f := _attribute(module, op, spec)) is not None and callable(f)]
        if not declared and not named_as_ops:
            functions = "a function named as an op, or {spec}:NAME of another and --op"
            raise UsageError(f"impl={spec}: expected IMPLEMENTATIONS in it, {functions.format(spec=spec)}")
        wanted = [(op, f) for op, f in named_as_ops if op in op_names] or named_as_ops
        return declared or tuple(_adapted(f, (op,), spec, location, op)[0] for op, f in wanted)
    named = tuple(i for i in declared if i.name == name)
    if named:
        return named
    target = _attribute(module, name, spec)
    layers = None if target is not None else _attribute(module, "layers", spec)
    if isinstance(layers, ModuleType):  # a kernel of the hub has them in a module of this name
        target = _attribute(layers, name, spec)
    if isinstance(target, Implementation):
        return _with_variants(validated(target, spec))
    if not callable(target):
        names = [i.name for i in declared] or [n for n, value in vars(module).items() if _of_file(value, module)]
        there = one_line(", ".join(names), 300) or "no function or class is"
        raise UsageError(f"impl={spec}: expected the name of what is in {location}: {there}")
    op_names = op_names or tuple(op for op in OPS if op == name)
    if not op_names:
        raise UsageError(f"op is missing: impl={spec} names a function; expected --op {'|'.join(OPS)} with it")
    return _adapted(target, op_names, spec, location, name)


def _adapted(target: Any, op_names: Sequence[str], spec: str, location: str, name: str) -> tuple[Implementation, ...]:
    from normcheck.impls.adapt import adapt, require_named  # imports torch

    found = {}
    for wanted in op_names:
        adapted = adapt(target, spec, OPS[wanted])
        op = with_residual(wanted, adapted.named)
        require_named(adapted, target, OPS[op], spec)
        found[op] = adapted
    file = Path(location)
    named = f"{file.parent.name if file.name == _PACKAGE else file.name}:{name}"
    return tuple(wrapped(adapted, op, named, str(location)) for op, adapted in found.items())


def wrapped(adapted: Adapted, op: str, name: str, source: str) -> Implementation:
    """An implementation of ``op`` from an adapted plain function; gradients come from autograd."""
    return Implementation(
        name=name,
        op=op,
        forward=adapted.forward,
        biases=adapted.biases,
        weights=adapted.weights,
        model=adapted.of_codes if OPS[op].quantises else {},
        source=source,
    )


def _declared(module: ModuleType, spec: str) -> tuple[Implementation, ...]:
    declared = _attribute(module, "IMPLEMENTATIONS", spec) or ()
    if not isinstance(declared, tuple | list):
        of = one_line(type(declared).__name__, 120)
        raise UsageError(f"impl={spec}: IMPLEMENTATIONS={of}: expected a tuple of Implementation")
    found = tuple(each for item in declared for each in _with_variants(validated(item, spec)))
    names = [(item.op, item.name) for item in found]
    for op, name in names:
        if names.count((op, name)) > 1:
            raise UsageError(f"impl={spec}: IMPLEMENTATIONS has {shown(name)} of {op} twice: expected a name for each")
    return found


def _with_variants(declared: Implementation) -> tuple[Implementation, ...]:
    """An implementation, and one for each of its variants, which has the environment of that besides its own."""
    plain = replace(declared, variants={})
    return (
        plain,
        *(
            replace(plain, name=f"{plain.name}[{name}]", environment={**plain.environment, **own})
            for name, own in declared.variants.items()
        ),
    )


def in_this_process(found: tuple[Implementation, ...]) -> tuple[Implementation, ...]:
    """The implementations as they are here, where nothing that has an environment can run."""
    return tuple(replace(i, unavailable=_no_environment) if i.environment else i for i in found)


def _no_environment(device: str) -> str:
    return "its environment takes a process of its own, which it has with --isolation, the default"


def _attribute(module: ModuleType, name: str, spec: str) -> Any:
    """The attribute ``name`` of ``module``, or None. Raises UsageError if a __getattr__ of the module raises."""
    try:
        return getattr(module, name, None)
    except Exception as error:
        raise UsageError(f"impl={spec}: reading {name} of it raised {_error_line(error)}; expected a value") from error


def validated(item: object, spec: str) -> Implementation:
    """``item``, if it is an implementation whose fields are what they should be. Raises UsageError."""
    if not isinstance(item, Implementation):
        raise UsageError(
            f"impl={spec}: IMPLEMENTATIONS has {one_line(type(item).__name__, 120)}: expected Implementation(...)"
        )
    where = f"of {shown(item.name)} in impl={spec}"
    if not isinstance(item.name, str) or not 0 < len(item.name) <= LONGEST_NAME:
        raise UsageError(f"name {where}: expected text of 1 to {LONGEST_NAME} characters")
    if not isinstance(item.op, str) or item.op not in OPS:
        raise UsageError(f"op={shown(item.op)} {where}: expected {one_of(OPS)}")
    if not callable(item.forward) or not (item.backward is None or callable(item.backward)):
        raise UsageError(f"forward, backward {where}: expected functions")
    if not all(hook is None or callable(hook) for hook in (item.supports, item.unavailable)):
        raise UsageError(f"supports, unavailable {where}: expected functions")
    for name, rule in rules(type(item)).items():
        if not rule.holds(getattr(item, name)):
            raise UsageError(f"{name}={shown(getattr(item, name))} {where}: expected {rule.words}")
    for dtype in item.dtypes:
        if not isinstance(dtype, str) or named(dtype) not in DTYPES:
            raise UsageError(f"dtypes={shown(dtype)} {where}: expected {one_of(DTYPES)}")
    if not callable(item.model) and not isinstance(item.model, Mapping):
        raise UsageError(f"model={shown(item.model)} {where}: expected a dict, or a function of the case")
    if OPS[item.op].quantises and (callable(item.model) or item.backward is not None):
        raise UsageError(f"model, backward {where}: expected a dict, which says what the scale is, and no backward")
    if item.lone_bias and False not in item.weights:
        raise UsageError(f"lone_bias=True weights={item.weights} {where}: expected False in weights with it")
    if item.trailing and item.weights != (True,):
        expected = "weights=(True,) with it: the shape of the weight says what is normed"
        raise UsageError(f"trailing=True weights={item.weights} {where}: expected {expected}")
    if len({*item.weight_layouts} & {"stacked", "interleaved"}) + item.trailing > 1:
        expected = (
            "expected stacked, interleaved or trailing alone: an x of rank 3 and a weight of rank 2 do not say which"
        )
        raise UsageError(f"weight_layouts={item.weight_layouts} trailing={item.trailing} {where}: {expected}")
    fields = {name: rule.read(getattr(item, name)) for name, rule in rules(type(item)).items()}
    return replace(item, op=with_residual(item.op, _required(item.forward)), **fields)


def _required(function: Any) -> tuple[str, ...]:
    """The parameters of a function that have no default; () if it does not say."""
    from normcheck.impls.call_signature import signature_of

    signature = signature_of(function)
    return tuple(p.name for p in signature.parameters.values() if p.default is p.empty) if signature else ()


def _of_file(value: object, module: ModuleType) -> bool:
    """Whether somebody may mean ``value`` by a name in ``module``: a function, or a class that is defined there."""
    return inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__)


def _require_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        wrong = "" if stat.S_ISREG(mode) else "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
    except (FileNotFoundError, ValueError):  # no file can have this name
        wrong = "no such file"
    except OSError as error:  # a circle of links, a folder that may not be read
        wrong = (error.strerror or "no such file").lower()
    if wrong:
        raise UsageError(f"impl={str(path)[:200]}: {wrong}, expected the path of a Python file")


def _load_file(path: Path) -> ModuleType:
    _require_file(path)
    path = path.resolve()
    name = f"normcheck_user_{abs(hash(path))}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    within = [str(path.parent)] if path.name == _PACKAGE else None  # so that it can import what is in it
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=within)
    if spec is None or spec.loader is None:
        raise UsageError(f"impl={path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickling look up their module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script: it can import the modules beside it
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what pytest skips a module with
        del sys.modules[name]
        raise ImportFailed(
            f"impl={path}: importing it raised {_error_line(error)}; expected a module that can be imported"
        ) from error
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for python -m: packages in the current directory are found
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what pytest skips a module with
        raise ImportFailed(
            f"impl={name}: importing it raised {_error_line(error)}; expected a module that can be imported"
        ) from error


def _error_line(error: BaseException) -> str:
    from normcheck.impls.kernels import on_cpu  # not before: it imports numpy

    last = traceback.extract_tb(error.__traceback__)[-1:]
    placed = isinstance(error, SyntaxError) and error.lineno is not None  # its message names the place
    known = last and not placed and not last[0].filename.startswith("<frozen ")  # not where Python itself compiles
    where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if known else ""
    return f"{one_line(error_text(error), 300)}{where}{on_cpu.because_of_no_gpu(error)}"
