"""What is printed: a reader that leaves changes nothing, and texts of data steer no terminal."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmtl import cli

TINY = ["data.clients=10", "schedule=full", "rounds=2", "eval_every=1", "baselines=[]"]


@contextlib.contextmanager
def without_reader(*names: str) -> Iterator[None]:
    """Standard output or error, by name, is a pipe whose reading end is closed."""
    read, write = os.pipe()
    os.close(read)
    before = {name: getattr(sys, name) for name in names}
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as pipe:
        for name in names:
            setattr(sys, name, pipe)
        try:
            yield
        finally:
            for name, stream in before.items():
                setattr(sys, name, stream)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose output nobody read."""
    here = tmp_path_factory.mktemp("pipe")
    with contextlib.chdir(here), without_reader("stdout", "stderr"):
        assert cli.main([*TINY, "hydra.run.dir=run"]) == 0
    return here


def test_a_run_ends_whole_without_a_reader(finished: Path) -> None:
    assert json.loads((finished / "run/private/result.json").read_text())["round"] == 2
    assert not list(finished.rglob("error.txt"))


def test_a_sweep_ends_whole_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with without_reader("stdout", "stderr"):
        assert cli.main(["-m", *TINY, "seed=1,2", "hydra.sweep.dir=sweep"]) == 0
    assert len(list(tmp_path.glob("sweep/*/private/result.json"))) == 2
    assert not list(tmp_path.rglob("error.txt"))


@pytest.mark.parametrize(
    "words",
    [
        ["report", "run"],
        ["verify", "run"],
        ["verify", "run", "--json"],
        ["resume", "run"],
        ["check", "data.clients=10"],
        ["--help"],
        ["--cfg", "job"],
    ],
)
def test_a_command_ends_as_if_it_was_read(
    words: list[str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    with without_reader("stdout"):
        assert cli.main(words) == 0
    assert not list(finished.rglob("error.txt"))


def test_a_verdict_reaches_a_shell_without_a_reader(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    file = finished / "run/public/privacy.json"
    before = file.read_bytes()
    file.write_bytes(before.replace(b'"delta"', b'"Delta"'))
    with without_reader("stdout"):
        assert cli.main(["verify", "run"]) == 1
    file.write_bytes(before)


@pytest.mark.parametrize("command", ["--help", "--help 2>&1", "verify run >&- 2>&-"])
def test_a_process_ends_quietly(command: str, finished: Path) -> None:
    """``--help`` is longer than what head reads; the interpreter flushes at its end."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = f"set -o pipefail; {sys.executable} -m fedmtl {command} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", words], cwd=finished, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_output_on_a_full_disk_is_said(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(finished)
    monkeypatch.setattr(sys.stdout, "write", write)
    assert cli.main(["verify", "run"]) == 1
    assert (
        "error: standard output could not be written: [Errno 28] No space left"
        in capsys.readouterr().err
    )
