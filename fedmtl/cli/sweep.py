"""Sweeps: a line for each job, and going on with those that were interrupted."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._rounding import number_text, rounded_up
from ..errors import ConfigError
from ..report.runs import ERROR
from ..report.tables import write_text
from .config import Config, combinations, compose, resolve
from .options import make_paths_absolute

if TYPE_CHECKING:
    from ..trainer import Result

STORED = "multirun.yaml"
_NUMBERED = "${hydra.job.num}"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Args:
        number: its place, from 0.
        of: how many there are; None if a sweeper of a plugin chooses them on the way.
        words: the settings that differ between them.
        sweep: the folder of the sweep.
    """

    number: int
    of: int | None
    words: str
    sweep: Path

    def __str__(self) -> str:
        of = "" if self.of is None else f"/{self.of}"
        return f"[{self.number + 1}{of}] {self.words}".rstrip()

    @property
    def watched(self) -> bool:
        """Whether a progress bar would be seen: without a terminal a job prints one line, at its end."""
        return sys.stderr.isatty()

    def line(self, result: Result, began: float, folder: Path) -> str:
        """Return what is printed of a finished job."""
        score = f"{result.metric.replace('_', ' ')} {number_text(result.final[result.metric])}"
        score += "" if result.finetuned is None else ", finetuned"
        score += ", training diverged" if result.lost else ""
        seconds = time.monotonic() - began
        return f"{self}: {score}, epsilon {rounded_up(result.epsilon, 3)}, {seconds:.0f} s, {folder}"


def jobs(overrides: Sequence[str], sweep: Path) -> list[tuple[Job, list[str]]]:
    """Return the jobs of a sweep in the order in which they are numbered, with their overrides."""
    runs = combinations(overrides, multirun=True)
    swept = [place for place in range(len(runs[0])) if len({run[place] for run in runs}) > 1]
    return [(Job(i, len(runs), " ".join(run[k] for k in swept), sweep), run) for i, run in enumerate(runs)]


def unlike(configs: Sequence[Config]) -> str:
    """Return a warning where methods of a sweep are finetuned beside others that are not, empty where all or none are.
    Local training is what all are compared with, and is not one of them."""
    methods = [
        ((config["algorithm"]["_target_"] or "auto").rpartition(".")[2], (config.get("finetune") or {}).get("_target_"))
        for config in configs
    ]
    tuned = {name: None for name, finetune in methods if finetune}
    plain = {name: None for name, finetune in methods if not finetune and name not in ("Local", *tuned)}
    if not tuned or not plain:
        return ""
    return (
        f"finetuned after training: {', '.join(tuned)}; not: {', '.join(plain)}. Their scores do not compare; give all "
        "of them the same, as finetune=kl or finetune=none."
    )


@dataclass(frozen=True)
class Left:
    """A job of an interrupted sweep: its folder and settings, None where it has finished; whether it has begun."""

    job: Job
    folder: Path
    command: str
    config: Config | None
    begun: bool


def left(sweep: Path) -> Iterator[Left]:
    """Yield the jobs of the sweep in ``sweep``.

    A job that never wrote its settings is composed anew, with paths as they were when the sweep began.

    Raises:
        ConfigError: a sweep whose folders are not numbered, or one with settings of Hydra, which could import modules.
    """
    from omegaconf import OmegaConf

    from ..trainer.folder import RunFolder

    stored: Any = OmegaConf.load(sweep / STORED)
    hydra: Any = OmegaConf.to_container(stored.hydra, resolve=False)
    if hydra["sweep"]["subdir"] != _NUMBERED:
        raise ConfigError(f"{sweep}: its folders are named by hydra.sweep.subdir; resume each of them by its own name.")
    sources = hydra["runtime"]["config_sources"]
    extra = next((Path(one["path"]) for one in sources if one["provider"] in ("user", "command-line")), None)
    task = [str(text) for text in hydra["overrides"]["task"]]
    for text in task:
        if text.lstrip("+~").startswith("hydra"):
            raise ConfigError(f"{sweep / STORED} has {text}, which is no setting of a run; take it out.")
    for job, overrides in jobs(task, sweep):
        folder = sweep / str(job.number)
        given, command = folder / "private" / "config.yaml", shlex.join(["fedmtl", *overrides])
        if (folder / "private" / "result.json").is_file():
            yield Left(job, folder, command, None, True)
        elif given.is_file():
            config: Any = OmegaConf.to_container(OmegaConf.load(given))
            yield Left(job, folder, command, config, RunFolder(folder).started)
        else:
            config = resolve(compose(overrides, extra))
            make_paths_absolute(config, hydra["runtime"]["cwd"])
            yield Left(job, folder, command, config, False)


@contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Leave the reason of a failure in the folder of a run, by which a report knows it from an unfinished one."""
    note = folder / "private" / ERROR
    note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            write_text(note, f"{' '.join(str(error).split()) or type(error).__name__}\n")
        raise
