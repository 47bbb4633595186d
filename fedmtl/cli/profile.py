"""``fedmtl profile``: where the time of a short run goes."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from .config import build
from .options import command_parser, short_run_options


def profile(words: list[str], debug: bool) -> int:
    """Print the time of each part of a short run.

    Args:
        words: overrides as for training, and ``--rounds``, ``--config-dir``.
        debug: unused; errors are handled by the caller.
    """
    parser = command_parser(
        "profile", "Time the parts of a short run: data, local work, releases, charges, evaluation."
    )
    options, config = short_run_options(parser, words, rounds=20, what="rounds, or activations of clients")

    from ..trainer.profile import profile as time_parts

    with TemporaryDirectory(prefix="fedmtl-profile-") as folder:
        began = time.perf_counter()
        trainer = build(config | {"logger": {}}, Path(folder))
        seconds = time.perf_counter() - began
        measured = time_parts(trainer, rounds=options.rounds, folder=Path(folder) / "run")
    print(f"{measured.text()}\nreading the data and the settings took {seconds:.3f} s before that")
    return 0
