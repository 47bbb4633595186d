"""Private multi-task learning by asynchronous proximal gradient (Xie et al. 2017)."""

from .algorithm import PPDMTL
from .published import PublishedPPDMTL

__all__ = ["PPDMTL", "PublishedPPDMTL"]
