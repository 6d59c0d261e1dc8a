"""Gather the pages of the documentation site in build/pages, where zensical finds them: `make site` does both.

The pages are the Markdown files of the repository as they are, and read the same there. Only links change: a page of
the site lies elsewhere than its file, and a linked Python file becomes a page with its source.
"""

from __future__ import annotations

import re
import shutil
import sys
from os.path import relpath
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "pages"
TOP = {"README.md": "index.md", "README.zh.md": "zh.md", "benchmarks/README.md": "benchmarks.md"}
TOP |= {f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")}
API = (
    "fleetx.fleet", "fleetx.DistributedStrategy", "fleetx.errors", "fleetx.optim", "fleetx.schedule", "fleetx.data",
    "fleetx.applications", "fleetx.integrations.transformers", "fleetx.integrations.fabric", "fleetx.static",
    "fleetx.utils",
)  # fmt: skip
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)
LINK = re.compile(r"`[^`]*`|(\]\()([^)\s#]*)(#[^)\s]*)?(\))")  # what is in `code` is none


def place(path: str) -> str | None:
    """Where a file of the repository is in the site; None: nowhere."""
    if path in TOP:
        return TOP[path]
    if path == "examples":
        return "examples.md"
    if path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    if path.startswith("docs/"):
        return re.sub(r"(^|/)README\.md$", r"\1index.md", path.removeprefix("docs/"))
    return None


def linked(page: str, target: str) -> str:
    """The file of the repository that a link of a page leads to."""
    return relpath((PurePosixPath(page).parent / target).as_posix())


def page(path: str, text: str, sources: set[str]) -> str:
    """The text of a page with the links of the site; Python files that it links to are added to `sources`."""

    def moved(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if not target or ":" in target:
            return match[0]
        file = linked(path, target)
        there = place(file)
        if there is None or not (ROOT / file).exists():
            raise SystemExit(f"{path} links to {target}: the site has no such page")
        if file.endswith(".py"):
            sources.add(file)
        return before + relpath(there, PurePosixPath(place(path) or "").parent.as_posix()) + (anchor or "") + after

    pieces = FENCE.split(text)  # prose, code, prose ...
    pieces[::2] = [LINK.sub(moved, nested(prose)) for prose in pieces[::2]]
    return "".join(pieces)


def nested(text: str) -> str:
    """GitHub nests at two spaces; Python-Markdown at four, and it wants a blank line before the next item."""
    text = re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.M)
    return re.sub(r"(\n\n(?: {4}.+\n)+)(?=- )", r"\1\n", text)


def source(path: str) -> str:
    """A page with a Python file."""
    return f"# {Path(path).name}\n\n`{path}`\n\n````python\n{(ROOT / path).read_text()}````\n"


def api(name: str) -> str:
    """A page that mkdocstrings fills from the docstrings of the source."""
    more = "\n## metrics\n\n::: fleetx.fleet.reductions.Metrics\n" if name == "fleetx.fleet" else ""  # an object
    return f"# {name}\n\n::: {name}\n{more}"


def gather() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    sources = {f"examples/{p.name}" for p in (ROOT / "examples").glob("*.py")}
    pages = {p: (ROOT / p).read_text() for p in TOP if (ROOT / p).exists()}
    for file in sorted((ROOT / "docs").rglob("*")):
        path = file.relative_to(ROOT).as_posix()
        if file.suffix == ".md":
            pages[path] = file.read_text()
        elif file.suffix in (".png", ".svg", ".json", ".css"):
            write(place(path) or "", file.read_bytes())
    for path, text in pages.items():
        write(place(path) or "", page(path, text, sources).encode())
    for path in sources:
        write(place(path) or "", source(path).encode())
    for name in API:
        write(f"api/{name}.md", api(name).encode())


def write(path: str, content: bytes) -> None:
    (OUT / path).parent.mkdir(parents=True, exist_ok=True)
    (OUT / path).write_bytes(content)


if __name__ == "__main__":
    sys.exit(gather())
