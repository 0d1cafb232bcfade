"""Types of the values in a JSON document, each with what it may be, for pydantic to check when it reads one.

The dataclasses of results, records and baselines are annotated with them. None of these modules imports pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_origin

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Name in a document -> the number that JSON does not have."""


@dataclass(frozen=True)
class Only:
    """The values that a field may have in a document: of exactly its type, ``least`` to ``most``, one of ``choices``,
    or those that pass ``check``; an array or an object has ``check`` alone.

    ``words``: the same for an error. Pydantic calls this when it reads a document, so this module need not import it.
    """

    words: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[Any], bool] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic_core import core_schema

        schema: Any = core_schema.literal_schema(list(self.choices)) if self.choices else handler(source)
        if schema["type"] in ("int", "float", "bool"):
            schema["strict"] = True
        schema |= {key: limit for key, limit in (("ge", self.least), ("le", self.most)) if limit is not None}
        if self.check:
            schema = core_schema.no_info_after_validator_function(self._checked, schema)
        if get_origin(source):  # what is wrong in one of its items is said of that
            return schema
        return core_schema.custom_error_schema(schema, custom_error_type="expected", custom_error_message=self.words)

    def _checked(self, value: Any) -> Any:
        from pydantic_core import PydanticCustomError

        if self.check and not self.check(value):
            raise PydanticCustomError("expected", "{words}", {"words": self.words})
        return value


class _Number:
    """A number, or one of NOT_FINITE by its name."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import PydanticCustomError, core_schema

        def read(value: object) -> float:
            if isinstance(value, str) and value in NOT_FINITE:
                return NOT_FINITE[value]
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1.8e308:
                raise PydanticCustomError("expected", 'a number, or "NaN", "Infinity", "-Infinity"')
            return value

        return core_schema.no_info_plain_validator_function(read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}


Whole = Annotated[int, Only("an integer")]
Count = Annotated[int, Only("an integer >= 0", least=0, most=10**18 - 1)]
Flag = Annotated[bool, Only("true or false")]
Number = Annotated[float, _Number()]


def one_of(*choices: str) -> Only:
    """One of a few strings."""
    return Only(f"one of {', '.join(choices)}", choices=choices)
