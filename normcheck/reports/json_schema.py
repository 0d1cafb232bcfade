"""JSON Schema of the JSON report, made from the types of a run.

``python -m normcheck.reports.json_schema > docs/report.schema.json``
"""

from __future__ import annotations

import json
from typing import Any

from normcheck.reports._next import DESCRIPTION
from normcheck.reports.json import SCHEMA
from normcheck.result import SweepResult

_OF_THE_NEXT_STEP = {
    "description": DESCRIPTION,
    "properties": {name: {"type": "string"} for name in ("do", "command")},
    "required": ["do", "command"],
    "title": "Next",
    "type": "object",
}


def json_schema() -> dict[str, Any]:
    """The schema of this version's reports, which have all keys; reports of later versions may have more."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Written(GenerateJsonSchema):
        def field_is_required(self, *_: Any, **__: Any) -> bool:
            return True

        def default_schema(self, schema: Any) -> dict[str, Any]:
            return self.generate_inner(schema["schema"])

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    of_a_run = TypeAdapter(SweepResult).json_schema(schema_generator=Written)
    head = {"schema": {"const": SCHEMA}, "normcheck": {"description": "Its version.", "type": "string"}}
    of_a_cell = of_a_run["$defs"]["Verdict"]
    of_a_cell["properties"]["next"] = {"$ref": "#/$defs/Next"}
    of_a_cell["required"].append("next")
    of_a_run["$defs"]["Next"] = _OF_THE_NEXT_STEP
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **of_a_run,
        "properties": {**head, **of_a_run["properties"]},
        "required": [*head, *of_a_run["required"]],
    }


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
