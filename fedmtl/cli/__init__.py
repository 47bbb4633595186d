"""The command line: ``fedmtl``."""

from .main import main

__all__ = ["main"]
