"""A folder has one run at a time: a second one is refused and writes nothing, and a killed process holds nothing."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedmtl import (
    ClientPrivacy,
    FedAvg,
    FullParticipation,
    LocalSGD,
    PrivateSearch,
    Trainer,
    cli,
    load_data,
    models,
)
from fedmtl._files import CLAIM, claimed, write_bytes
from fedmtl.cli.folders import claimed_sweep, new_folder
from fedmtl.errors import ConfigError
from fedmtl.ranks import Ranks
from fedmtl.trainer.folder import RunFolder

TINY = ["data.clients=10", "schedule=full", "rounds=1", "baselines=[]", "progress=false"]


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, with the time at which it was written."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        data=load_data("digits", clients=10),
        model=models.softmax_regression(),
        schedule=FullParticipation(),
        privacy=ClientPrivacy(clip_norm=0.5, epsilon=20.0),
        rounds=1,
        folder=tmp_path / "run",
        progress=False,
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_program_leaves_the_folder_of_another_alone(trainer: Trainer, resume: bool) -> None:
    search = PrivateSearch(
        candidates={"a": trainer, "b": replace(trainer, rounds=1)}, folder=trainer.folder
    )
    with RunFolder(Path(trainer.folder)).claimed(resume=False):
        before = files(Path(trainer.folder))
        for settings in (trainer, search):
            with pytest.raises(
                ConfigError,
                match=r"run', in which another process is running; choose another folder",
            ):
                settings.fit(resume=resume)
        assert files(Path(trainer.folder)) == before
    assert not Path(trainer.folder).exists()
    trainer.fit(ranks=Ranks())
    assert not list(Path(trainer.folder).rglob(CLAIM))


@pytest.mark.parametrize(
    "words",
    [
        [*TINY, "hydra.run.dir=run"],
        ["search", *TINY, "privacy.clip_norm=0.5,1", "--folder", "run"],
        ["resume", "run"],
        ["-m", *TINY, "seed=1,2", "hydra.sweep.dir=sweep"],
        ["resume", "sweep"],
    ],
)
def test_a_command_leaves_the_folder_of_another_alone(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for job in ("run", "sweep/0"):
        write_bytes(Path(job, "private/config.yaml"), b"algorithm: nothing\n")
    with RunFolder(Path("run")).claimed(resume=False), claimed_sweep(Path("sweep")):
        before = files(tmp_path)
        assert cli.main(words) == 2
        assert files(tmp_path) == before
    said = capsys.readouterr().err
    assert "another process" in said
    assert said.count("\n") == 1


def test_one_of_many_holds_a_folder(tmp_path: Path) -> None:
    """Each holder adds one to a number that it reads first: one that is lost shows two holders at once. Holders remove
    the folder and its lock at their end, which the others must bear."""
    folder, count = tmp_path / "run/private", tmp_path / "count"
    count.write_text("0")

    def add(times: int) -> None:
        while times:
            try:
                with claimed(folder):
                    number = int(count.read_text())
                    time.sleep(0.0005)
                    count.write_text(str(number + 1))
                    times -= 1
            except BlockingIOError:
                pass

    assert _ended([_forked(lambda: add(25)) for _ in range(4)]) == [0] * 4
    assert count.read_text() == "100"
    assert not folder.exists()


def test_a_killed_process_holds_nothing(tmp_path: Path, trainer: Trainer) -> None:
    folder, ready = RunFolder(tmp_path / "run"), tmp_path / "ready"

    def hold() -> None:
        with folder.claimed(resume=False):
            (folder.private / "metrics.csv.0123abcd.tmp").touch()
            (folder.private / "own.tmp").touch()
            ready.touch()
            time.sleep(600)

    child = _forked(hold)
    while not ready.exists():
        time.sleep(0.005)
    with pytest.raises(ConfigError, match="another process"):
        trainer.fit(ranks=Ranks())
    os.kill(child, signal.SIGKILL)
    _ended([child])
    assert (folder.private / CLAIM).exists()
    trainer.fit(ranks=Ranks())
    assert [file.name for file in folder.private.glob("*.tmp")] == ["own.tmp"]


def test_a_system_without_locks_runs(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    trainer.fit(ranks=Ranks())
    assert (tmp_path / "run/private/result.json").is_file()


def test_jobs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "2025-01-31/12-00-00")
    with (
        new_folder("outputs") as first,
        new_folder("outputs") as second,
        new_folder("outputs") as third,
    ):
        assert [place.name for place in (first, second, third)] == [
            "12-00-00",
            "12-00-00_2",
            "12-00-00_3",
        ]
        write_bytes(second / "file", b"")
    assert [path.name for path in tmp_path.glob("outputs/*/*")] == ["12-00-00_2"]
    quick = [*TINY, "finetune=none", "data.train_images=1"]
    for _ in range(2):
        assert cli.main(quick) == 0
    for _ in range(2):
        assert cli.main(["-m", *quick, "seed=1"]) == 0
    for place, jobs in (
        ("outputs/*/*", ["12-00-00", "12-00-00_2", "12-00-00_3"]),
        ("multirun/*/*", ["12-00-00", "12-00-00_2"]),
    ):
        assert sorted(path.name for path in tmp_path.glob(place)) == jobs
    assert len(list(tmp_path.glob("**/private/result.json"))) == 4


def _forked(act: Callable[[], None]) -> int:
    """Return the number of a process that acts and ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return child


def _ended(children: list[int]) -> list[int]:
    return [os.waitpid(child, 0)[1] for child in children]
