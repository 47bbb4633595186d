"""What the pages need beside mkdocs: links to files of the repository that are no pages, and to names in docstrings.

Figures come along, other files are named by their path.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "pages"
ROOT = PAGES.parents[1]
ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):<code>(~?)([\w.]+)</code>")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def _inside(page: Path, target: str) -> str | None:
    """Return the path within the repository of a file or folder that is not below ``pages``, or None."""
    path = (page.parent / target).resolve()
    if not path.exists() or path.is_relative_to(PAGES) or not path.is_relative_to(ROOT):
        return None
    return path.relative_to(ROOT).as_posix()


def on_files(files: Any, config: Any) -> Any:
    """Add the figures that pages show from elsewhere in the repository, below ``figures/``."""
    from mkdocs.structure.files import File

    added = set()
    for page in PAGES.rglob("*.md"):
        for mark, _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = _inside(page, target)
            if mark and path and path not in added:
                added.add(path)
                files.append(
                    File.generated(config, f"figures/{path}", abs_src_path=str(ROOT / path))
                )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show those figures, and write the path of every other such file where its link was.

    A link to what does not exist stays a link, which the strict build refuses.
    """
    source = Path(page.file.abs_src_path)
    up = "../" * page.file.src_uri.count("/")

    def replaced(found: re.Match[str]) -> str:
        mark, text, target, _ = found.groups()
        path = _inside(source, target)
        if path is None:
            return found[0]
        return f"![{text}]({up}figures/{path})" if mark else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)


@cache
def _places() -> dict[str, str]:
    """Return where the reference has each public name, from its pages."""
    places = {}
    for page in (PAGES / "reference").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for module, options in re.findall(r"^::: ([\w.]+)\n((?: +.*\n|\n)*)", text, re.MULTILINE):
            path = ROOT / module.replace(".", "/")
            source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(
                encoding="utf-8"
            )
            listed = re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
            names = listed or re.findall(r'"(\w+)"', source.split("__all__ = [")[1].split("]")[0])
            places |= {name: f"{module}.{name}" for name in names}
    return places


def on_page_content(html: str, **_: Any) -> str:
    """Link what docstrings name as ``:class:`~package.Name```, where the reference has it."""

    def linked(found: re.Match[str]) -> str:
        short, name = found.groups()
        parts = name.split(".")
        known = next((i for i, part in enumerate(parts) if part in _places()), None)
        place = name if known is None else ".".join([_places()[parts[known]], *parts[known + 1 :]])
        return f'<autoref identifier="{place}" optional><code>{parts[-1] if short else name}</code></autoref>'

    return ROLE.sub(linked, html)
