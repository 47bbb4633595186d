"""Model-protected multi-task learning (Liang et al. 2020)."""

from .algorithm import MPMTL
from .layers import MPMTLayers
from .published import PublishedMPMTL

__all__ = ["MPMTL", "MPMTLayers", "PublishedMPMTL"]
