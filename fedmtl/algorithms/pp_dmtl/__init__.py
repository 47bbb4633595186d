"""Asynchronous privacy-preserving multi-task learning (Xie et al. 2017)."""

from .algorithm import PPDMTL

__all__ = ["PPDMTL"]
