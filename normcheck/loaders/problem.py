"""``verify --kernelbench PROBLEM.py ANSWER.py``: the answer to a problem of KernelBench as a cell.

The problem describes itself in a process of its own. What its ``Model`` computes, over which dimensions and with which
eps, is found by judging it; then the class of the answer is judged as that.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normcheck.cases.case import MAX_ELEMENTS, Case
from normcheck.errors import ImportFailed, UsageError, one_line
from normcheck.files import contents
from normcheck.gate.options import ReproOptions, VerifyOptions
from normcheck.gate.prepare import selected
from normcheck.impls.implementation import Implementation
from normcheck.loaders.asked import Loaded
from normcheck.loaders.folder import Folder, private_folder, told_of
from normcheck.loaders.modules import DESCRIPTION, ENTRY, ENTRY_SOURCE, SPEC, Geometry, Variant, Wanted
from normcheck.loaders.recognise import recognised
from normcheck.loaders.signature import written_eps
from normcheck.oracle.l2norm import EPS
from normcheck.runner.device import device_for
from normcheck.runner.session import session_of

_MADE = (("rmsnorm", ""), ("layernorm", ""), *(("l2norm", eps) for eps in EPS))
"""The ops that are tried, the last one with all that eps may do."""

_OPS = "rmsnorm, layernorm, l2norm or groupnorm"

_MOST_GROUPINGS = 6
"""Numbers of groups that are tried: those of a GroupNorm in the problem, of its arguments, one, and one a channel."""

_OF_NO_EPS = (0.0, 1e-12)
"""The eps of a norm by length in which none is written: none, and the one of torch.nn.functional.normalize."""
_MOST_BYTES = 1 << 20
_MOST_RANK = 6
_SWEPT_ELEMENTS = {"cpu": 320_000, "cuda": 1 << 22}
_PROBED_ELEMENTS = 1 << 14

_SIDES = {
    1: ((7,), (64,), (129,), (16,), (1024,)),
    2: ((3, 5), (8, 16), (7, 31)),
    3: ((3, 5, 7), (2, 4, 8), (4, 16, 32)),
}
"""How many dimensions are normed -> smaller sizes of these, if its class takes others."""

_ROWS = ((3, 5, 2, 1, 2), (1, 1, 1, 1, 1), (2, 8, 3, 2, 1), (20, 3, 5, 1, 1))
"""Smaller sizes of the other dimensions."""


class Described(BaseModel):
    """What a problem says of itself, see ``modules``. It comes from a process in which its code has run."""

    model_config = ConfigDict(strict=True, extra="forbid")

    shape: list[Annotated[int, Field(ge=1, le=1 << 31)]] = Field(min_length=2, max_length=_MOST_RANK)
    init: list[Any] = Field(max_length=64)
    parameters: list[tuple[Annotated[str, Field(max_length=200)], int]] = Field(max_length=16)
    eps: list[Annotated[float, Field(ge=1e-30, le=1)]] = Field(max_length=16)
    groups: list[Annotated[int, Field(ge=1, le=1 << 20)]] = Field(max_length=16)
    normed: Annotated[int, Field(ge=0, le=_MOST_RANK)]


@contextmanager
def answered(options: VerifyOptions | ReproOptions, dtypes: tuple[str, ...]) -> Iterator[Loaded]:
    """The cells of the answer that ``options`` name, one for each of ``dtypes``. Raises UsageError."""
    assert options.kernelbench is not None
    problem, answer = (_python(path) for path in options.kernelbench)
    what = f"kernelbench={one_line(options.kernelbench[0], 200)}"
    device = device_for(options.device)
    source = _source(problem, what)
    with private_folder() as folder:
        described = _described(folder, problem, what, device, options.timeout)
        wanted = _recognised(folder, problem, source, described, what, device, options.timeout)
        wanted = replace(wanted, name=f"{Path(answer).name}:ModelNew", file=answer, kind="ModelNew", dtypes=dtypes)
        geometry = wanted.geometries[0]
        given = tuple(dict.fromkeys(map(geometry.rows_and_columns, _given(described))))
        yield Loaded(
            claims=wanted.declared(geometry, _never, supports=_asks),
            place=_written(folder, "answer", wanted),
            device=device,
            words=("--kernelbench", *options.kernelbench),
            named=f"kernelbench={one_line(options.kernelbench[1], 200)}",
            asked=given,
            given=frozenset(given),
        )


def _python(path: str) -> str:
    if not path.endswith(".py") or not Path(path).is_file():
        raise UsageError(
            f"kernelbench={one_line(path, 200)}: no such Python file; expected --kernelbench PROBLEM.py ANSWER.py"
        )
    return str(Path(path).resolve())


def _source(path: str, what: str) -> str:
    """The text of a problem, of which only numbers are read here."""
    try:
        text = contents(path, _MOST_BYTES).decode("utf-8")
        ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UsageError(f"{what}: {one_line(str(error), 200)}; expected a Python file of at most 1 MiB") from None
    return text


def _described(folder: Folder, problem: str, what: str, device: str, timeout: float) -> Described:
    place = _written(folder, "problem", Wanted(name="problem", file=problem, kind=""))
    try:
        (found,) = selected(str(place), (), device, timeout, isolation=True)
    except ImportFailed as failed:
        raise told_of(failed, place, what) from None
    text = found.model.get(DESCRIPTION) if not callable(found.model) else None
    if not isinstance(text, str) or len(text) > _MOST_BYTES:
        raise UsageError(f"{what}: expected a problem with Model, get_inputs and get_init_inputs")
    told = json.loads(text) if text.startswith("{") else {}
    if isinstance(told.get("wrong"), str):
        raise UsageError(f"{what}: {one_line(told['wrong'], 300)}")
    try:
        described = Described.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        raise UsageError(f"{what}: {at}: {first['msg']}; expected one tensor, normed over some dimensions") from None
    if math.prod(described.shape) > MAX_ELEMENTS:
        raise UsageError(f"{what}: x of {tuple(described.shape)}: expected at most {MAX_ELEMENTS:,} elements")
    return described


def _recognised(
    folder: Folder, problem: str, source: str, described: Described, what: str, device: str, timeout: float
) -> Wanted:
    """The problem's op, dimensions, eps and parameters, and the shapes to check: found by judging its ``Model``."""
    tries = list(_tries(described, _SWEPT_ELEMENTS[device]))
    for number, (parameters, geometries) in enumerate(tries):
        wanted = Wanted(
            name="problem", file=problem, kind="Model", device=device, parameters=parameters, geometries=geometries
        )
        found = _tried(folder, wanted, described, source, what, device, timeout, below=f"tried{number}")
        if isinstance(found, Wanted):
            return found
    over = dict.fromkeys(", ".join(map(str, geometries[0].dims)) for _, geometries in tries)
    tried = "; ".join(f"over {dims}" for dims in over) or "over any dimensions"
    raise UsageError(f"{what}: expected a Model that is {_OPS} {tried}, with an eps that is written in it")


def _tries(described: Described, most: int) -> Iterator[tuple[tuple[tuple[str, str], ...], tuple[Geometry, ...]]]:
    """(parameters with their roles, geometries) that a problem may have; variants of ``most`` elements but its own."""
    usual = sorted(_candidates(described), key=lambda one: len(one[0]) != described.normed)
    for dims, parameters in usual:
        variants = tuple(_variants(described, dims, most))
        made = _MADE[: len(parameters)] if parameters else _MADE  # a layernorm has both, a norm by length has none
        yield parameters, tuple(Geometry(op=op, dims=dims, variants=variants, eps=eps) for op, eps in made)
    channels, names = described.shape[1], [name for name, _ in described.parameters]
    of_channels = all(elements == channels for _, elements in described.parameters)
    if len(described.shape) > 2 and len(names) in (0, 2) and of_channels:
        dims, variants = tuple(range(1, len(described.shape))), tuple(_of_channels(described, most))
        groups = (*described.groups, *_numbers(described.init), 1, channels)
        counts = dict.fromkeys(n for n in groups if channels % n == 0)
        yield (
            _roles(names),
            tuple(
                Geometry(op="groupnorm", dims=dims, variants=variants, groups=count, channels=channels)
                for count in list(counts)[:_MOST_GROUPINGS]
            ),
        )


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers from 1 on in the arguments of a problem."""
    inner = value["tuple"] if isinstance(value, dict) else value
    if isinstance(inner, list):
        for item in inner:
            yield from _numbers(item)
    elif type(inner) is int and inner > 0:
        yield inner


def _tried(
    folder: Folder,
    wanted: Wanted,
    described: Described,
    source: str,
    what: str,
    device: str,
    timeout: float,
    *,
    below: str,
) -> Wanted | None:
    """``wanted`` with the one geometry and the eps that the problem keeps to; None if there is none."""
    first = wanted.geometries[0]
    place = _written(folder, below, wanted)
    found = selected(str(place), (), device, timeout, isolation=True)
    forwards = dict(zip(wanted.geometries, found, strict=True))
    first = replace(first, variants=_taken(first, found[0], described))
    own = {replace(g, variants=first.variants): forward for g, forward in forwards.items()}
    wanted = replace(wanted, geometries=tuple(own))
    small = min(first.variants, key=lambda v: (abs(math.prod(v.shape) - _PROBED_ELEMENTS), v.shape))
    shape = first.rows_and_columns(small.shape)
    tried = replace(wanted, shapes=(shape,))
    candidates = {g: tried.declared(g, found.forward) for g, found in own.items()}
    epsilons = tuple(dict.fromkeys((*described.eps, *written_eps(source))))
    by_mean = [made for g, made in candidates.items() if not g.eps]
    by_length = [made for g, made in candidates.items() if g.eps]
    try:
        match = recognised(by_mean, epsilons, device, timeout, what)
    except UsageError:
        try:
            match = recognised(by_length, (*_OF_NO_EPS, *epsilons), device, timeout, what)
        except UsageError:
            return None
    geometry = next(g for g, made in candidates.items() if made is match.implementation)
    given = tuple(map(geometry.rows_and_columns, _given(described)))
    shapes = tuple(s for v in geometry.variants if (s := geometry.rows_and_columns(v.shape)) not in given)
    return replace(
        wanted,
        geometries=(geometry,),
        given=given,
        shapes=shapes or given[-1:],
        epsilons=(match.eps,) if match.eps is not None else (),
    )


def _taken(geometry: Geometry, model: Implementation, described: Described) -> tuple[Variant, ...]:
    """The variants that the problem's own class takes; its own shapes in any case."""
    given, supports = _given(described), model.supports
    if supports is None:
        return geometry.variants
    with session_of(model):
        return tuple(v for v in geometry.variants if v.shape in given or supports(_case(geometry, v)) is None)


def _case(geometry: Geometry, variant: Variant) -> Case:
    rows, columns = geometry.rows_and_columns(variant.shape)
    return Case(op=geometry.op, dtype="fp32", M=rows, N=columns)


def _candidates(described: Described) -> Iterator[tuple[tuple[int, ...], tuple[tuple[str, str], ...]]]:
    """(dimensions, parameters with their roles) that a problem of this shape and with these parameters may have."""
    rank = len(described.shape)
    dims = [tuple(range(rank - described.normed, rank))] if 0 < described.normed < rank else []
    dims += [(1,), (rank - 1,), tuple(range(2, rank)), tuple(range(1, rank))]
    for own in dict.fromkeys(dims):
        columns = math.prod(described.shape[d] for d in own)
        if not own or len(own) not in _SIDES or any(elements != columns for _, elements in described.parameters):
            continue
        names = [name for name, _ in described.parameters]
        if len(names) > 2:
            continue
        yield own, _roles(names)


def _roles(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The parameters with their roles: the bias is what is called so, or the last of two."""
    shifts = [n for n in names if any(word in n.lower() for word in ("bias", "beta", "shift"))]
    bias = shifts[0] if shifts else names[-1] if len(names) == 2 else ""
    return tuple((name, "bias" if name == bias else "weight") for name in names)


def _variants(described: Described, dims: tuple[int, ...], most: int) -> Iterator[Variant]:
    """The given shapes, and smaller ones: of fewer rows, and of shorter ones, whose size may stand in the arguments."""
    shape = tuple(described.shape)
    own = tuple(shape[d] for d in dims)
    seen: set[tuple[int, int]] = set()
    sized = [(sides, _resized(described.init, own, sides)) for sides in (own, *_SIDES[len(dims)])]
    for given in _given(described):
        seen.add((math.prod(given) // math.prod(own), math.prod(own)))
        yield Variant(shape=given, init=json.dumps(described.init))
    for number, (sides, init) in enumerate(sized):
        if init is None or (number and math.prod(sides) >= math.prod(own)):
            continue
        for rows in _ROWS if number < 2 else _ROWS[:2]:
            other = iter(rows)
            small = tuple(sides[dims.index(d)] if d in dims else min(next(other), shape[d]) for d in range(len(shape)))
            key = (math.prod(small) // math.prod(sides), math.prod(sides))
            if key in seen or math.prod(small) > most:
                continue
            seen.add(key)
            yield Variant(shape=small, init=json.dumps(init))


def _of_channels(described: Described, most: int) -> Iterator[Variant]:
    """The given shapes, and smaller ones of the same channels: of fewer samples, with less behind each channel."""
    init, (_, channels, *own) = json.dumps(described.init), described.shape
    seen = set(_given(described))
    for shape in _given(described):
        yield Variant(shape=shape, init=init)
    for sides in ((1,) * len(own), *_SIDES.get(len(own), ())):
        for samples, *_ in _ROWS:
            shape = (min(samples, described.shape[0]), channels, *sides)
            smaller = all(side <= whole for side, whole in zip(sides, own, strict=True))
            if smaller and shape not in seen and math.prod(shape) <= most:
                seen.add(shape)
                yield Variant(shape=shape, init=init)


def _given(described: Described) -> tuple[tuple[int, ...], ...]:
    """The shape of the problem, and the same with a batch of one."""
    shape = tuple(described.shape)
    return tuple(dict.fromkeys((shape, (1, *shape[1:]))))


def _resized(init: list[Any], old: tuple[int, ...], new: tuple[int, ...]) -> list[Any] | None:
    """The arguments with ``new`` sizes in place of the ``old``; as they are if they do not hold these, so that x alone
    says them, and None if they hold them several times.
    """
    if old == new:
        return init
    count = 0

    def put(value: Any) -> Any:
        nonlocal count
        inner = value["tuple"] if isinstance(value, dict) else value
        if isinstance(inner, list):
            if tuple(inner) == old:
                count += 1
                return {"tuple": list(new)} if isinstance(value, dict) else list(new)
            made = [put(item) for item in inner]
            return {"tuple": made} if isinstance(value, dict) else made
        if len(old) == 1 and type(value) is int and value == old[0]:
            count += 1
            return new[0]
        return value

    made = [put(item) for item in init]
    return made if count <= 1 else None


def _written(folder: Folder, below: str, wanted: Wanted) -> Path:
    return folder.write({ENTRY: ENTRY_SOURCE, SPEC: wanted.as_json()}, below) / ENTRY


def _never(*arguments: object, **options: object) -> None:
    """In place of a forward, which is in another process."""
    raise TypeError("this function is in another process")


def _asks(case: Case) -> str | None:
    """In place of ``supports``, which is asked of that process."""
    raise TypeError("this function is in another process")
