"""A page of HTML as its parts, and what every page of ours must be."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """The elements and attributes of a page, its text but for style and data, and its headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.headings, self._open = "", [""], [""]
        self.unclosed: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self._open.append(tag)
        if tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self._open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open[-1] not in ("style", "script"):
            self.text += data
        if self._open[-1] in ("h1", "h2", "h3"):
            self.headings[-1] += data


def require_sound(text: str) -> Page:
    """Fail unless every element is closed, every id and link is right, and nothing runs or is fetched."""
    page = Page(text)
    assert page.unclosed == [] and page._open == [""]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a.get("href") for _, a in page.elements if "href" in a]
    links += [f"#{a['aria-labelledby']}" for _, a in page.elements if "aria-labelledby" in a]
    assert {str(link).removeprefix("#") for link in links} <= set(ids)
    assert not {tag for tag, _ in page.elements} & _LOADING
    for tag, attributes in page.elements:
        assert "style" not in attributes and not any(key.startswith("on") for key in attributes), (tag, attributes)
        for key in ("href", "src", "xlink:href"):
            assert str(attributes.get(key, "#")).startswith("#"), (tag, attributes)
        assert tag != "script" or attributes.get("type") == "application/json"
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style and "@import" not in style
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    text.encode("utf-8")
    return page


_LOADING = {"iframe", "img", "image", "link", "object", "embed", "form", "base", "video", "audio", "foreignobject"}
"""Elements that fetch or send something, or may hold what does."""
