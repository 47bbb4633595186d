"""The fenced blocks of the documentation's pages, and what it takes to run them at small sizes.

A page is a session: its blocks run in order, in one folder. Blocks of Python share one namespace. A block with a
``title`` is a file, and blocks of the same title follow one another in it. In a block of commands every line is run,
with small sizes appended. Before a block a comment ``<!-- small: ... -->`` may add settings to its commands, each in
place of the same one there, or say what replaces what in its Python, as ``rounds=100 -> rounds=2; ...``;
``<!-- exit: 1 -->`` is the exit code expected.
"""

import itertools
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.distributed.run import main as torchrun

from fedmtl import cli
from fedmtl.cli.config import combinations, compose, read
from fedmtl.cli.names import EXTRA, TRUST
from tests import copies

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = DOCS / "pages"
FOLDER, SWEEP = (
    "outputs/DATE/TIME",
    "multirun/DATE/TIME",
)  # what the pages call the folder of the run before

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!--[^\n]*-->\n+)*)^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SMALL: dict[str, str | int] = {
    "data.clients": 20,
    "data.tasks": 4,
    "data.agents": 6,
    "data.features": 6,
    "schedule.cohort": 10,
    "schedule.concurrency": 8,
    "schedule.buffer": 2,
    "schedule.rest": 2,
    "schedule.per_client": 3,
    "rounds": 2,
    "replicates": 2,
    "progress": "false",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it belongs to, its text, and how the tests change it."""

    language: str
    text: str
    title: str = ""
    small: str = ""
    code: int = 0


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a page, all or those of one language, without those that show a file of docs/examples."""
    found = []
    for match in _BLOCK.finditer((PAGES / page).read_text(encoding="utf-8")):
        title = re.search(r'title="([^"]+)"', match["options"])
        small = re.search(r"<!-- small: (.*?) -->", match["comments"])
        code = re.search(r"<!-- exit: (\d+) -->", match["comments"])
        found.append(
            Block(
                match["language"],
                match["text"],
                title[1] if title else "",
                small[1] if small else "",
                int(code[1]) if code else 0,
            )
        )
    return [
        one
        for one in found
        if language in (None, one.language) and not one.text.startswith("--8<--")
    ]


def lines(text: str) -> Iterator[list[str]]:
    """Yield the words of every command, without its comment."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def write(block: Block, folder: Path) -> None:
    """Add a block to its file."""
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(block.text + "\n")


def small_settings(words: list[str]) -> list[str]:
    """Return a command's settings with those sizes made small that its configuration has."""
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    last = {word.split("=")[0]: word for word in settings}  # a comment may give a list one value
    words = [word for word in words if word not in settings or word in last.values()]
    config = compose(combinations(read(list(last.values())))[0])
    sizes = {
        key: value
        for key, value in _SMALL.items()
        if isinstance(OmegaConf.select(config, key), (int, str))
    }
    if OmegaConf.select(config, "replicates") == 1:
        del sizes["replicates"]
    if "finetune=kl" in words:
        sizes["finetune.local.epochs"] = 1  # of twenty, and of every run of a sweep
    if (
        "clocks" in (OmegaConf.select(config, "schedule._target_") or "").lower()
    ):  # algorithm=auto has none
        sizes["rounds"] = 30  # activations
    kept = [word for word in words if word.split("=")[0] not in sizes or "," in word]
    sizes = {
        key: value
        for key, value in sizes.items()
        if not any(word.startswith(f"{key}=") for word in kept)
    }
    return [*kept, *(f"{key}={value}" for key, value in sizes.items())]


def fedmtl(words: list[str], small: list[str]) -> int:
    """Run a documented command at small sizes, its run in :data:`FOLDER`; returns the exit code."""
    verb = words[0] if words and "=" not in words[0] and not words[0].startswith("-") else ""
    rest = words[1:] if verb else words
    trusted = TRUST.set(
        tuple(after for word, after in itertools.pairwise(rest) if word == "--trust")
    )
    if verb in ("", "audit", "search") and not {"--help", "--version", "--cfg"} & set(rest):
        where = rest.index("--config-dir") + 1 if "--config-dir" in rest else None
        searched = EXTRA.set(None if where is None else Path(rest[where]))
        rest = small_settings([*rest, *small])
        EXTRA.reset(searched)
        if not verb:
            multirun = {"-m", "--multirun"} & set(rest)
            rest.append(
                f"hydra.sweep.dir={_fresh(SWEEP)}"
                if multirun
                else f"hydra.run.dir={_fresh(FOLDER)}"
            )
        elif verb == "search":
            rest += ["--folder", _fresh(FOLDER), "--mean", "1", "--score-noise", "0.2"]
    elif verb != "resume":  # which takes the settings of its folder
        rest = [*rest, *small]
    TRUST.reset(trusted)
    return cli.main([verb, *rest] if verb else rest)


def launched(words: list[str], small: list[str]) -> int:
    """Run a documented command of torchrun, at small sizes; returns the exit code.

    A sweep runs in this process: ``tests/trainer/test_ranks.py`` has one over several.
    """
    if words[1:4] == ["-m", "fedmtl", "-m"]:
        return fedmtl(words[3:], small)
    if words[1:3] == ["-m", "fedmtl"] and words[3:] and words[3] != "resume":
        words = [
            *words[:3],
            *small_settings([*words[3:], *small]),
            f"hydra.run.dir={_fresh(FOLDER)}",
        ]
    single = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    single["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    there = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]

    def program() -> int:
        os.environ.update(single)
        torchrun([*there, *words])
        return 0

    # torchrun is a copy of this process, and starts the ranks as processes of their own
    running = copies.begun(program, Path.cwd())
    running.join(300)
    return running.exitcode


def _fresh(folder: str) -> str:
    """Return the name of a folder in which there is nothing any more."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def run_commands(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every line of a block of commands."""
    for words in lines(block.text):
        if words[0] == "export":
            name, value = words[1].split("=", 1)
            assert (name, value) == ("PYTHONPATH", "."), words
            monkeypatch.syspath_prepend(str(Path.cwd()))
        elif words[0] == "fedmtl":
            assert fedmtl(words[1:], shlex.split(block.small)) == block.code, words
        elif words[0] == "torchrun":
            assert launched(words[1:], shlex.split(block.small)) == block.code, words
        elif words[0] == "python" and words[1].startswith("docs/examples/"):
            program = ROOT / words[1]
            assert program.exists(), words
            if not program.with_suffix(
                ".txt"
            ).exists():  # it writes data; the others are run by test_examples
                runpy.run_path(str(program), run_name="__main__")
        elif words[0] == "python":
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", words[1:])
                runpy.run_path(words[1], run_name="__main__")
        else:
            assert words[:2] == ["pip", "install"], f"{words}: the tests do not know this command"


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block of Python, with what its comment replaces."""
    text = block.text
    for change in filter(None, block.small.split("; ")):
        before, after = change.split(" -> ")
        assert before in text, f"{before!r} is not in the block"
        text = text.replace(before, after)
    exec(compile(text, "<page>", "exec"), namespace)
