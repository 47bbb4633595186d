"""A run folder that was copied, rolled back or mixed with another one."""

import json
from pathlib import Path

import pytest

from fedmtl import ClientPrivacy
from fedmtl.errors import ResumeError
from fedmtl.privacy.chain import Head, read_chain
from fedmtl.trainer.folder import Checkpoint, RunFolder

from ..small import Ended, Ends
from .ledgers import charges
from .settings import DELTA, NOISE, trainer


def run(
    folder: Path,
    *,
    after: int | None = None,
    resume: bool = False,
    source: str = "secure",
    mechanism: str = "gaussian",
    **more,
):
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source=source, mechanism=mechanism)
    stops = () if after is None else (Ends(after - 1),)
    made = trainer(folder=folder, privacy=privacy, rounds=12, checkpoint_every=1, callbacks=stops, **more)
    if after is None:
        return made.fit(resume=resume)
    with pytest.raises(Ended):
        made.fit(resume=resume)
    return None


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_ledger_behind_its_checkpoint_is_refused(tmp_path: Path, source: str) -> None:
    """Also where the ledger and its head file are rolled back together."""
    run(tmp_path / "a", after=4, source=source)
    older = {path: path.read_bytes() for path in (tmp_path / "a/private").glob("ledger.*")}
    run(tmp_path / "a", after=9, resume=True, source=source)
    for path, content in older.items():
        path.write_bytes(content)
    with pytest.raises(ResumeError, match="rolled back or belongs to another run"):
        run(tmp_path / "a", resume=True, source=source)
    before = (tmp_path / "a/private/ledger.jsonl").read_bytes()
    assert before == older[tmp_path / "a/private/ledger.jsonl"]  # nothing was written to it


def test_the_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        run(tmp_path / name, after=4, source="seeded")
    for path in (tmp_path / "b/private").glob("ledger.*"):
        (tmp_path / "a/private" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ResumeError, match="belongs to another run"):
        run(tmp_path / "a", resume=True, source="seeded")
    (tmp_path / "a/private/ledger.jsonl").unlink()
    with pytest.raises(ResumeError, match="missing"):
        run(tmp_path / "a", resume=True, source="seeded")


def test_the_head_is_in_the_report_and_in_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path)
    folder = RunFolder(tmp_path)
    report = json.loads((folder.public / "privacy.json").read_text())
    head = Head.parse((folder.private / "ledger.head").read_text())
    chain = read_chain(folder.ledger)
    assert chain.head == head
    assert chain.head == Head(report["ledger_lines"], report["ledger_head"])
    assert report["run"] == chain.digests[0]
    kept = Checkpoint.read(folder.checkpoint).ledger
    assert kept.lines == report["ledger_lines"] - 1  # the close comes after the checkpoint
    assert charges(folder.ledger).total() == 12
    assert any("copy of this run" in text for text in report["outside"])
