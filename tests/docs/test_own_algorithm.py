"""The algorithm of the documentation is Ditto, to the bit; its page has it audited."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedmtl import cli
from tests.docs.pages import blocks, write


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, outside of the package, with the algorithm of the text."""
    for block in blocks("own-algorithm.md"):
        if block.title:
            write(block, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("privacy", ["client", "record", "none"])
def test_the_algorithm_of_the_text_is_ditto(privacy: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"privacy={privacy}",
        "rounds=2",
        "data.clients=20",
        "schedule.cohort=10",
        "baselines=[]",
        "progress=false",
    ]
    for name in ("my_ditto", "ditto"):
        assert (
            cli.main(
                ["--config-dir", "mine", "--trust", "my_ditto", *words, f"algorithm={name}", f"hydra.run.dir={name}"]
            )
            == 0
        )
        printed = capsys.readouterr().out
        assert "public/   privacy.json, " in printed
        assert ("a simulation, not private; to publish" in printed) == (privacy != "none")
        assert ("not private, to be kept like private/" in printed) == (privacy == "none")
    for file in ("public/model.safetensors", "private/models.safetensors"):
        own, known = (load_file(mine / name / file) for name in ("my_ditto", "ditto"))
        assert own.keys() == known.keys()
        assert all((own[key] == known[key]).all() for key in known)


def test_a_module_that_python_does_not_find_is_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml = mine / "mine" / "algorithm" / "my_ditto.yaml"
    (yaml.parent / "lost.yaml").write_text(yaml.read_text().replace("my_ditto.", "nowhere."))
    assert cli.main(["--config-dir", "mine", "--trust", "nowhere", "algorithm=lost"]) == 2
    assert capsys.readouterr().err == (
        "fedmtl: error: algorithm._target_ is 'nowhere.MyDitto', which cannot be imported (No module named 'nowhere'); "
        "it must be MODULE.NAME, with the module's folder on PYTHONPATH.\n"
    )
