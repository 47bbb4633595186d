"""The command line: ``fedmtl``."""

from .._extras import extras

with extras():
    from .main import main

__all__ = ["main"]
