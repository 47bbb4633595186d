"""The folders of runs and sweeps: new ones, claimed ones, and their names in messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .._files import claimed, remove_empty
from ..errors import ConfigError


@contextmanager
def claimed_sweep(folder: Path) -> Iterator[None]:
    """Holds the folder of a sweep for the block.

    Raises:
        ConfigError: another process holds it, or no file can be written there.
    """
    with ExitStack() as stack:
        try:
            # for as long as the sweep runs: two sweeps would write into each other's runs
            stack.enter_context(claimed(folder))
        except BlockingIOError as error:
            raise ConfigError(
                f"{short(folder)} is the folder of a sweep that another process runs; choose "
                "another folder, or wait until it has ended."
            ) from error
        except OSError as error:
            raise no_folder(error) from error
        yield


@contextmanager
def new_folder(kind: str) -> Iterator[Path]:
    """Makes a folder named by the date and time, ``KIND/2025-01-31/12-00-00``, which no other
    process has: those that begin within one second are ``12-00-00_2`` and so on. It is removed at
    the end if nothing was written there.

    Raises:
        ConfigError: it cannot be made.
    """
    when = Path(kind, time.strftime("%Y-%m-%d/%H-%M-%S"))
    count = 1
    folder = when
    made = False
    while not made:
        try:
            # making it is the claim: of two processes only one succeeds
            folder.mkdir(parents=True)
            made = True
        except FileExistsError as error:
            if not folder.is_dir():
                raise no_folder(error) from error
            count += 1
            folder = when.with_name(f"{when.name}_{count}")
        # another process has removed its empty folder, and that of the date with it
        except FileNotFoundError:
            continue
        except OSError as error:
            raise no_folder(error) from error
    try:
        yield folder
    finally:
        for empty in (folder, folder.parent, folder.parent.parent):
            remove_empty(empty)


def no_folder(error: OSError) -> ConfigError:
    return ConfigError(
        f"the folder of the run cannot be made: {error}; choose another with hydra.run.dir=FOLDER."
    )


def short(folder: Path) -> Path:
    """Returns the folder relative to the user's folder, when it lies below."""
    try:
        return folder.resolve().relative_to(Path.cwd())
    except ValueError:
        return folder
