"""Checks for what an attacker's text would do in a page or a terminal."""

from html.parser import HTMLParser
from pathlib import Path

from cases import JS

# All tags of lmtrain's pages; any other tag comes from injected text.
TAGS = {
    "html",
    "wbr",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "script",
    "h1",
    "h2",
    "h3",
    "p",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "pre",
    "i",
    "b",
    "span",
    "div",
    "svg",
    "text",
    "rect",
    "g",
    "path",
    "line",
    "polyline",
    "circle",
    "details",
    "summary",
    "section",
    "ul",
    "li",
    "code",
    "label",
    "input",
    "button",
    "figure",
    "figcaption",
    "a",
    "nav",
    "main",
    "header",
    "footer",
    "br",
    "small",
    "strong",
    "em",
    "dl",
    "dt",
    "dd",
    "caption",
    "template",
    "select",
    "option",
}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.inside: str | None = None  # script, style or json

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.inside = tag if tag in ("script", "style") else None
        if tag == "script" and values.get("type") == "application/json":
            self.inside = "json"
        if tag not in TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attrs:
            loads = name in ("src", "href", "action", "data", "xlink:href") and not (value or "").startswith(
                ("#", "data:")
            )
            if name.startswith("on") or JS in name or loads:
                self.wrong.append(f"<{tag} {name}={value!r}>")

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style") and JS in data:
            self.wrong.append(f"{JS} in a {self.inside}")


def wrong_in(page: Path) -> list[str]:
    """Returns the tags, handlers and addresses in a page that lmtrain's own pages never contain."""
    reader = _Page()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    return reader.wrong


def unprintable(text: str) -> list[str]:
    """Returns the characters of the text that control a terminal."""
    return [c for c in text if c != "\n" and not c.isprintable()]
