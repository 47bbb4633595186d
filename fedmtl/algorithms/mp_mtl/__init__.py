"""Model-protected multi-task learning (Liang et al. 2020)."""

from .algorithm import MPMTL
from .layers import MPMTLayers

__all__ = ["MPMTL", "MPMTLayers"]
