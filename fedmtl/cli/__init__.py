"""The command line: ``fedmtl``.

:mod:`~fedmtl.cli.main` finds the command. Settings go from :mod:`~fedmtl.cli.words`, as people
write them, through :mod:`~fedmtl.cli.config`, which lets Hydra compose the files that they choose
(:mod:`~fedmtl.cli.defaults`), to :mod:`~fedmtl.cli.build`, which makes a
:class:`fedmtl.Trainer` of them. :mod:`~fedmtl.cli.run` trains it; the other commands are in files
of their names, or in :mod:`~fedmtl.cli.commands`.
"""

from .._extras import extras

with extras():
    from .main import main

__all__ = ["main"]
