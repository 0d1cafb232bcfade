"""A module of somebody's file as an implementation, x in the shape that its problem has; this runs in the kernel's
process.

``normcheck_module.json`` says how: ``Wanted`` as data. Without a class that is judged, the problem itself is described.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.errors import Broken, UsageError, error_text, one_line
from normcheck.impls.implementation import ONE_MODULE, Implementation
from normcheck.loaders.entry import imported, tuples

if TYPE_CHECKING:
    from torch import Tensor

SPEC, ENTRY = "normcheck_module.json", "normcheck_module.py"

ENTRY_SOURCE = """\
from pathlib import Path
from normcheck.loaders.modules import implementations
IMPLEMENTATIONS = implementations(Path(__file__).parent)
"""

DESCRIPTION = "description"
"""The key of the model under which a problem's description reaches the process that judges, as JSON."""

_WORDS = {"weight": ("weight", "gamma", "scale"), "bias": ("bias", "beta", "shift")}
_MOST_EPS, _MOST_PARAMETERS = 16, 16


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One shape of x, and the arguments that make the module for it, as JSON: a tuple is {"tuple": [...]}."""

    shape: tuple[int, ...]
    init: str


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """``op`` over the dimensions ``dims`` of x, at each of the ``variants``. ``eps``: what that does, as a model's.

    ``groups``, ``channels``: of an op that norms so many groups of so many channels, 0 of another one.
    """

    op: str
    dims: tuple[int, ...]
    variants: tuple[Variant, ...]
    eps: str = ""
    groups: int = 0
    channels: int = 0

    def rows_and_columns(self, shape: Sequence[int]) -> tuple[int, int]:
        """(M, N) of x of this shape."""
        columns = math.prod(shape[d] for d in self.dims)
        return math.prod(shape) // columns, columns


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The class ``kind`` of ``file`` as ``name``, in each of ``geometries``; ``parameters``: (key of the state dict,
    role) of the problem's. ``given``: the (M, N) that it cannot refuse. ``kind`` "": describe the problem in ``file``.
    """

    name: str
    file: str
    kind: str
    dtypes: tuple[str, ...] = ("fp32",)
    parameters: tuple[tuple[str, str], ...] = ()
    geometries: tuple[Geometry, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    given: tuple[tuple[int, int], ...] = ()
    epsilons: tuple[float, ...] = ()
    device: str = "cpu"

    def as_json(self) -> str:
        """This as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Wanted:
        """What ``as_json`` wrote."""
        told = {name: tuples(value) for name, value in json.loads(text).items() if name != "geometries"}
        geometries = tuple(
            Geometry(
                op=own["op"],
                dims=tuple(own["dims"]),
                variants=tuple(Variant(shape=tuple(v["shape"]), init=v["init"]) for v in own["variants"]),
                **{name: own[name] for name in ("eps", "groups", "channels")},
            )
            for own in json.loads(text)["geometries"]
        )
        return cls(**told, geometries=geometries)

    def declared(self, geometry: Geometry, forward: Callable[..., Any], **hooks: Any) -> Implementation:
        """The implementation of a geometry with this ``forward``, and these claims: in both processes the same."""
        roles = {role for _, role in self.parameters}
        over = ",".join(map(str, geometry.dims)) + f" by {geometry.eps}" * bool(geometry.eps)
        over += f" in {geometry.groups} groups" * bool(geometry.groups)
        model = {"eps": geometry.eps} if geometry.eps else {"activation": "none"} if geometry.groups else {}
        return Implementation(
            name=self.name if len(self.geometries) == 1 else f"{self.name} over {over}",
            op=geometry.op,
            forward=forward,
            dtypes=self.dtypes,
            biases=("bias" in roles,),
            weights=("weight" in roles,),
            weight_dtypes=("io",),
            shapes=self.shapes or tuple(geometry.rows_and_columns(v.shape) for v in geometry.variants),
            epsilons=self.epsilons or None,
            channels=geometry.channels,
            groups=geometry.groups,
            model=model,
            source=self.file,
            **hooks,
        )


def implementations(folder: Path) -> tuple[Implementation, ...]:
    """Import what ``folder`` names. Raises what its import raises."""
    wanted = Wanted.read((folder / SPEC).read_text(encoding="utf-8"))
    module = imported(Path(wanted.file))
    if not wanted.kind:
        try:
            text = json.dumps(_described(module))
        except UsageError as wrong:
            text = json.dumps({"wrong": str(wrong)})
        return (Implementation(name=wanted.name, op="rmsnorm", forward=_described, model={DESCRIPTION: text}),)
    kind = getattr(module, wanted.kind, None)
    if not isinstance(kind, type):
        raise UsageError(f"{Path(wanted.file).name}: expected a class {wanted.kind}(torch.nn.Module) in it")
    return tuple(_of(wanted, geometry, kind) for geometry in wanted.geometries)


def _of(wanted: Wanted, geometry: Geometry, kind: type[Any]) -> Implementation:
    called = Called(wanted, geometry, kind)
    called.__wrapped__ = getattr(kind, "forward", None)  # for source_location
    return wanted.declared(geometry, called, supports=called.refusal)


class Called:
    """The forward of an implementation that calls instances of ``kind``, one for each variant."""

    def __init__(self, wanted: Wanted, geometry: Geometry, kind: type[Any]) -> None:
        self._wanted, self._geometry, self._kind = wanted, geometry, kind
        self._variants = {geometry.rows_and_columns(v.shape): v for v in geometry.variants}
        self._made = lru_cache(maxsize=2)(self._make)
        self._refusals: dict[tuple[int, int], str | None] = {}
        self.__wrapped__: Any = None
        setattr(self, ONE_MODULE, True)

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **options: Any) -> Tensor:
        """y of x, both (M, N), or (B, C, L), whose rows become the problem's normed dimensions. It has no gradients."""
        import torch

        rows, columns = x.shape[0], math.prod(x.shape[1:])
        variant = self._variants.get((rows, columns))
        if variant is None:
            raise UsageError(f"M={rows} N={columns}: expected one of the shapes of its problem")
        with torch.no_grad():
            module = self._made(variant, x.device, x.dtype)
            roles = {role: t for role, t in (("weight", weight), ("bias", bias)) if t is not None}
            self._load(module, roles)
            return self._flat(module(self._full(x, variant.shape)), variant.shape).reshape(x.shape)

    def refusal(self, case: Case) -> str | None:
        """Why the class does not take a shape that is not its problem's own: it was made and called, and raised."""
        import torch

        shape = (case.M, case.N)
        if shape in self._wanted.given or shape not in self._variants:
            return None
        if shape not in self._refusals:
            variant = self._variants[shape]
            device = torch.device(self._wanted.device)
            try:
                with torch.no_grad():
                    module = self._made(variant, device, torch.float32)
                    module(torch.ones(variant.shape, device=device))
                self._refusals[shape] = None
            except Exception as error:
                said = one_line(error_text(error), 120)
                self._refusals[shape] = f"x of {variant.shape}: {self._wanted.kind} raised {said}"
        return self._refusals[shape]

    def _make(self, variant: Variant, device: Any, dtype: Any) -> Any:
        return self._kind(*plain(json.loads(variant.init))).to(device=device, dtype=dtype)

    def _load(self, module: Any, roles: Mapping[str, Tensor]) -> None:
        """Put weight and bias into the module's state. Raises Broken if it has no place for one."""
        state = module.state_dict()
        places = _places(state, self._wanted.parameters, next((t.numel() for t in roles.values()), 0))
        for key, role in self._wanted.parameters:
            if key not in places:
                elements = roles[role].numel()
                message = f"{self._wanted.kind} has no parameter for {key}: expected {elements} elements in its state"
                raise Broken("exception", "", message)
            state[places[key]] = roles[role].reshape(state[places[key]].shape)
        module.load_state_dict(state)

    def _full(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        order = self._order(len(shape))
        back = [order.index(axis) for axis in range(len(shape))]
        return x.reshape([shape[axis] for axis in order]).permute(back).contiguous()

    def _flat(self, y: Any, shape: tuple[int, ...]) -> Tensor:
        import torch

        if not isinstance(y, torch.Tensor):
            raise Broken("missing", "y", f"y is {one_line(type(y).__name__, 60)}: expected a tensor")
        if tuple(y.shape) != shape:
            raise Broken("shape", "y", f"y.shape={tuple(y.shape)}: expected {shape}")
        rows, columns = self._geometry.rows_and_columns(shape)
        return y.permute(self._order(len(shape))).reshape(rows, columns)

    def _order(self, rank: int) -> list[int]:
        """The axes of x, the normed ones last."""
        return [axis for axis in range(rank) if axis not in self._geometry.dims] + list(self._geometry.dims)


def plain(value: Any) -> Any:
    """Arguments as they were before ``described``."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return tuple(plain(item) for item in value["tuple"]) if isinstance(value, dict) else value


def _places(state: Mapping[str, Tensor], parameters: Sequence[tuple[str, str]], elements: int) -> Mapping[str, str]:
    """Key of the problem's state -> that of the answer's: the same, else one whose name says the role, else what is
    left over, if as many are. Only those of so many ``elements``.
    """
    left = [key for key, tensor in state.items() if tensor.numel() == elements]
    places: dict[str, str] = {}
    for fits in (lambda own, key, role: own == key, lambda own, key, role: _says(own, role)):
        for key, role in parameters:
            found = [own for own in left if key not in places and fits(own, key, role)]
            if len(found) == 1:
                places[key] = found[0]
                left.remove(found[0])
    rest = [key for key, _ in parameters if key not in places]
    return places | (dict(zip(rest, left, strict=True)) if len(rest) == len(left) else {})


def _says(name: str, role: str) -> bool:
    return any(word in name.lower() for word in _WORDS[role])


def _described(module: Any) -> dict[str, Any]:
    """What a problem says of itself: the shape of x, the arguments of its class, parameters, eps and normed sizes."""
    import torch

    for name in ("Model", "get_inputs", "get_init_inputs"):
        if not callable(getattr(module, name, None)):
            raise UsageError(f"no {name} in it: expected a problem with Model, get_inputs and get_init_inputs")
    init = list(module.get_init_inputs())
    model = module.Model(*init)
    inputs = _inputs(module)
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        raise UsageError(f"get_inputs() gives {len(inputs)} values: expected one tensor")
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.RMSNorm)]
    groups = [m.num_groups for m in model.modules() if isinstance(m, torch.nn.GroupNorm)]
    eps = [v for m in model.modules() for k, v in vars(m).items() if "eps" in k.lower() and type(v) is float]
    return {
        "shape": list(inputs[0].shape),
        "init": _told(init),
        "parameters": [[k, v.numel()] for k, v in model.state_dict().items()][:_MOST_PARAMETERS],
        "eps": eps[:_MOST_EPS],
        "groups": groups[:_MOST_EPS],
        "normed": len(norms[0].normalized_shape) if norms else 0,
    }


def _inputs(module: Any) -> list[Any]:
    """The inputs of a problem, without their memory if its code allows that."""
    import torch

    try:
        with torch.device("meta"):
            return list(module.get_inputs())
    except Exception:
        return list(module.get_inputs())


def _told(value: Any) -> Any:
    """Arguments as JSON. Raises UsageError for other than numbers, text and lists of them."""
    if isinstance(value, tuple):
        return {"tuple": [_told(item) for item in value]}
    if isinstance(value, list):
        return [_told(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"get_init_inputs() has {one_line(type(value).__name__, 60)}: expected numbers, text, lists of them"
    )
