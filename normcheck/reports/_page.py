"""A page of HTML in one file: no network, no script, and a content policy that says so.

The policy allows one style sheet, by its digest, and nothing else, so no ``style`` attribute works: what a picture
needs are classes and presentation attributes. The document that a page was made from is embedded as JSON, which no
browser runs; ``document.load`` finds it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TextIO

from normcheck.errors import visible
from normcheck.reports.document import EMBEDDED, text_of

if TYPE_CHECKING:
    from jinja2 import Environment

NEEDS = ("jinja2", "matplotlib")
"""What a page is made with."""


def put_page(stream: TextIO, template: str, document: Mapping[str, Any], **shown: Any) -> None:
    """Write the page ``template`` with what is ``shown``, and ``document`` embedded."""
    from markupsafe import Markup

    style = (files(__package__) / "templates" / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    data = text_of(document, indent=None).rstrip().replace("<", "\\u003c")
    fixed = {"style": Markup(style), "digest": digest, "data": Markup(data), "embedded": EMBEDDED}
    page = _templates().get_template(template).render(**fixed, **shown)
    stream.write(page.encode("ascii", "xmlcharrefreplace").decode("ascii"))  # no stream's encoding can refuse it


def _templates() -> Environment:
    import jinja2

    loader = jinja2.PackageLoader(__package__.partition(".")[0], "")  # a template is named by its room
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters["visible"] = visible  # no control character reaches a page, not even one that HTML allows
    return made
