"""A hook of mkdocs: notebooks/*.ipynb become pages, with what their cells printed and drew when they were last run.

README.md becomes the first page, and that of examples/stories/ a page.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINES = 60  # of a cell's output
_BYTES = 400_000  # of a picture


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each notebook beside docs/, the README and that of the example."""
    top = Path(config["docs_dir"]).parent
    for path in sorted((top / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    for name, path in {"index.md": top / "README.md", "stories.md": top / "examples" / "stories" / "README.md"}.items():
        files.append(File.generated(config, name, content=readme(path.read_text(encoding="utf-8"))))
    return files


def readme(text: str) -> str:
    """Returns a README as a page: links lead to the pages beside it; files that the site lacks are only named."""
    text = re.sub(r"\[([^]]+)\]\((?!https?:|(?:\.\./)*docs/)[^)]+\)", r"\1", text)
    return re.sub(r'(\]\(|src=")(?:\.\./)*docs/', r"\1", text)


def page(path: Path) -> str:
    """A notebook as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    name = f"notebooks/{path.name}"
    parts = [_cell(cell) for cell in cells]
    return "\n\n".join([parts[0], f"*This page is `{name}`, with its output as it was last run.*", *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"]).rstrip()
    if cell["cell_type"] != "code":
        return source
    return "\n\n".join([_fenced(source, "python"), *(_output(one) for one in cell.get("outputs", []))])


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max((len(part) - len(part.lstrip("`")) for part in text.splitlines()), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    picture = "".join(data.get("image/png", ""))
    if picture and len(base64.b64decode(picture)) <= _BYTES:
        return f"![](data:image/png;base64,{''.join(picture.split())})"
    lines = "".join(output.get("text") or data.get("text/plain", "")).rstrip().splitlines()
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"... ({len(lines) - _LINES} more lines)"]
    return _fenced("\n".join(lines), "text") if lines else ""
