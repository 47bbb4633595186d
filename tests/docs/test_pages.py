"""Every command and every program of the documentation runs, at small sizes; every page is in its place."""

import importlib.util
import re
import shutil
from pathlib import Path
from textwrap import dedent

import pandas as pd
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

import fedmtl
from tests.docs.pages import (
    DOCS,
    FOLDER,
    PAGES,
    ROOT,
    Block,
    blocks,
    run_commands,
    run_python,
    write,
)

NAMES = sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name)])
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page == "secure-aggregation.md":
        pytest.importorskip("cryptography", reason="secure aggregation needs the extra secure")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        if block.title:
            write(block, tmp_path)
        elif block.language == "bash":
            run_commands(block, monkeypatch)
        elif block.language == "python":
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            run_python(block, namespace)
        else:
            # sh: commands of other programs, which scripts/deploy.py runs
            assert block.language in ("text", "yaml", "json", "csv", "sh"), (
                f"what is {block.language}?"
            )


SMALL = {
    "FedAvg": "rounds=100 -> rounds=2; epochs=20 -> epochs=1; cohort=100 -> cohort=10; "
    '"digits") -> "digits", clients=20)',
    "from_tensors": "",
}


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("visits.csv").write_text(
        "ward,days,age\n" + "".join(f"w{i % 2},{i}.0,{i % 5}\n" for i in range(20))
    )
    x, y = torch.randn(10, 3), torch.arange(10) % 2
    namespace: dict[str, object] = {"__name__": "__page__", "dataset": TensorDataset(x, y)}
    namespace |= {"x": x, "y": y, "test_x": x, "test_y": y}
    namespace["table"] = pd.DataFrame(
        {"user": ["a", "b"] * 5, "label": [0, 1] * 5, "image": x.tolist()}
    )
    section = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .split("\n## In Python\n")[1]
        .split("\n## ")[0]
    )
    found = [
        dedent(text)
        for text in re.findall(r"(?:^(?: {4}.*)?\n)+", section, re.MULTILINE)
        if text.strip()
    ]
    assert len(found) == len(SMALL)
    for text in found:
        small = next(changes for name, changes in SMALL.items() if name in text)
        run_python(Block("python", text, small=small), namespace)


def test_every_link_leads_to_something() -> None:
    for name in NAMES:
        text = re.sub(
            r"^```.*?^```$",
            "",
            (PAGES / name).read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        for target in LINK.findall(text):
            path, _, anchor = target.partition("#")
            assert not re.match(r"[a-z]+:|/", path), f"{name}: {target}"
            there = (PAGES / name).parent / path if path else PAGES / name
            assert there.exists(), f"{name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = [
                    re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
                    for title in titles
                ]
                assert anchor in slugs, f"{name}: {target}, accepted: {slugs}"


def test_every_page_is_in_the_contents_once() -> None:
    class Loader(yaml.SafeLoader):
        """Of the configuration, whose tags name objects of other packages."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((DOCS / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def pages(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [page for value in entry.values() for page in pages(value)]
        return (
            [page for value in entry for page in pages(value)]
            if isinstance(entry, list)
            else [str(entry)]
        )

    assert sorted(pages(config["nav"])) == NAMES


def test_the_reference_has_every_public_name() -> None:
    listed = set()
    for page in (PAGES / "reference").glob("*.md"):
        if page.stem == "flower" and importlib.util.find_spec("flwr") is None:
            continue
        for module, options in re.findall(
            r"^::: ([\w.]+)\n((?: +.*\n|\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            names = (
                re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
                or importlib.import_module(module).__all__
            )
            there = importlib.import_module(module)
            assert all(hasattr(there, name) for name in names), f"{page.name}: {module}"
            listed |= {id(getattr(there, name)) for name in names}
    missing = [
        name
        for name in fedmtl.__all__
        if name != "models" and id(getattr(fedmtl, name)) not in listed
    ]
    for module in ("algorithms", "data", "models", "privacy", "schedules", "graphs"):
        package = importlib.import_module(f"fedmtl.{module}")
        missing += [
            f"{module}.{name}"
            for name in package.__all__
            if id(getattr(package, name)) not in listed
        ]
    assert not missing


def test_nothing_is_fetched_by_a_reader() -> None:
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix in (".md", ".yml", ".py", ".svg", ".css"):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|analytics", text), path.relative_to(ROOT)
    assert FOLDER == "outputs/DATE/TIME"
