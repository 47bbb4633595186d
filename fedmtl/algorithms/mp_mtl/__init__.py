"""Model-protected multi-task learning (Liang et al. 2020)."""

from .algorithm import MPMTL

__all__ = ["MPMTL"]
