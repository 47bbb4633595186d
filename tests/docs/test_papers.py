"""The tables of papers.md hold the values of the configurations."""

import re

import pytest
import yaml
from omegaconf import OmegaConf

from fedmtl.cli.config import compose
from tests.docs.pages import PAGES, ROOT

SECTIONS = (PAGES / "papers.md").read_text(encoding="utf-8").split("\n## ")[1:]
HEADER = "| setting | the paper | as published | default | why |"


def rows_of(section: str) -> dict[str, tuple[object, object]]:
    """The settings of a section's table, each with the two values that it states."""
    lines = section[section.index(HEADER) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 5 for row in cells)
    return {row[0].strip("`"): (yaml.safe_load(row[2]), yaml.safe_load(row[3])) for row in cells}


def leaves(node: dict, place: str = "") -> list[str]:
    """The dotted keys of what a file sets."""
    found: list[str] = []
    for key, value in node.items():
        if key not in ("defaults", "_target_"):
            found += (
                leaves(value, f"{place}{key}.") if isinstance(value, dict) else [f"{place}{key}"]
            )
    return found


def test_each_of_the_five_papers_has_a_table() -> None:
    assert len(SECTIONS) == 5
    assert all(HEADER in section for section in SECTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=[section.splitlines()[0] for section in SECTIONS])
def test_a_table_states_the_settings_of_the_configurations(section: str) -> None:
    published, default = re.findall(r"`((?:algorithm|experiment)=\w+)`", section)[:2]
    stated = rows_of(section)
    for column, name in enumerate((published, default)):
        config = compose([name])
        for key, values in stated.items():
            actual, value = OmegaConf.select(config, key, throw_on_missing=True), values[column]
            assert actual == value, f"{name}: {key} is {actual!r}, and the page says {value!r}"


@pytest.mark.parametrize("name", ["mp_mtl", "pp_dmtl", "async_learner", "p2p"])
def test_what_a_published_configuration_sets_stands_in_its_table(name: str) -> None:
    file = ROOT / "configs" / "algorithm" / f"{name}_published.yaml"
    (section,) = [
        section
        for section in SECTIONS
        if f"`algorithm={name}_published`" in section.split(HEADER)[0]
    ]
    assert set(leaves(yaml.safe_load(file.read_text()))) <= set(rows_of(section))
