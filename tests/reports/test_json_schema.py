"""The published schema is that of the types, and every report holds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from normcheck.reports.json import document
from normcheck.reports.json_schema import json_schema
from tests.inner_loop import parametrize
from tests.sample_runs import RUNS, hostile, large

PUBLISHED = Path(__file__).parents[2] / "docs" / "report.schema.json"
ALL = {**RUNS, "hostile": hostile, "large": large}
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "number": (int, float),
    "null": type(None),
}


def test_the_published_schema_is_that_of_this_version() -> None:
    """Else: python -m normcheck.reports.json_schema > docs/report.schema.json"""
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == json_schema()


@parametrize("name", ALL, inner=7)
def test_a_report_holds_to_it(name: str) -> None:
    holds(json.loads(json.dumps(document(ALL[name]()))), json_schema(), "report")


def test_it_would_object() -> None:
    report = document(RUNS[next(iter(RUNS))]())
    for change in ({"seed": "0"}, {"status": "fine"}, {"exit_code": -1}, {"verdicts": {}}, {"complete": 1}):
        with pytest.raises(AssertionError):
            holds({**report, **change}, json_schema(), "report")
    with pytest.raises(AssertionError):
        holds({key: value for key, value in report.items() if key != "part"}, json_schema(), "report")


def holds(value: Any, schema: dict[str, Any], where: str, root: dict[str, Any] | None = None) -> None:
    """Assert what of JSON Schema the published one uses; an unknown keyword is an error of this test."""
    root = root or schema
    known = {"$schema", "$defs", "description", "title", "type", "properties", "required", "items", "anyOf", "enum"}
    assert schema.keys() <= known | {"$ref", "const", "minimum", "maximum", "additionalProperties"}, where
    if "$ref" in schema:
        holds(value, root["$defs"][schema["$ref"].rpartition("/")[2]], where, root)
    if "anyOf" in schema:
        assert any(is_one(value, option, where, root) for option in schema["anyOf"]), where
    if "type" in schema:
        assert isinstance(value, TYPES[schema["type"]]), where
        assert not isinstance(value, bool) or schema["type"] == "boolean", where
    assert value in schema.get("enum", [value]), where
    assert value == schema.get("const", value), where
    assert not schema.keys() & {"minimum", "maximum"} or schema["minimum"] <= value <= schema["maximum"], where
    if isinstance(value, dict):
        assert value.keys() >= set(schema.get("required", ())), where
        named = schema.get("properties", {})
        assert not named or value.keys() == named.keys(), where  # what is written is what is published
        for key, item in value.items():
            rest = schema.get("additionalProperties", {})
            holds(item, named.get(key, {} if isinstance(rest, bool) else rest), f"{where}.{key}", root)
    if isinstance(value, list):
        for number, item in enumerate(value):
            holds(item, schema.get("items", {}), f"{where}[{number}]", root)


def is_one(value: Any, schema: dict[str, Any], where: str, root: dict[str, Any]) -> bool:
    try:
        holds(value, schema, where, root)
    except AssertionError:
        return False
    return True
