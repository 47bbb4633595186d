"""``fedmtl profile``: where the time of a short run goes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError
from .config import build, check, compose, resolve


def profile(words: list[str], debug: bool) -> int:
    """Print the time of each part of a short run.

    Args:
        words: overrides as for training, and ``--rounds``, ``--config-dir``.
        debug: unused; errors are handled by the caller.
    """
    parser = argparse.ArgumentParser(
        prog="fedmtl profile",
        description="Time the parts of a short run: data, local work, releases, charges, evaluation.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, as for training")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, or activations of clients (default 20)")
    parser.add_argument("-cd", "--config-dir", type=Path, help="a folder with your own groups, searched first")
    options = parser.parse_intermixed_args(words)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it must be a whole number of at least 1.")
    check(options.overrides, extra=options.config_dir)

    from ..trainer.profile import profile as time_parts

    with TemporaryDirectory(prefix="fedmtl-profile-") as folder:
        config = resolve(compose(tuple(options.overrides), options.config_dir)) | {"logger": {}}
        began = time.perf_counter()
        trainer = build(config, Path(folder))
        seconds = time.perf_counter() - began
        found = time_parts(trainer, rounds=options.rounds, folder=Path(folder) / "run")
    print(f"{found.text()}\nreading the data and the settings took {seconds:.3f} s before that")
    return 0
