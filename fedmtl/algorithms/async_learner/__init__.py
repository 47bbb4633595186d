"""The asynchronous central learner (Farokhi et al. 2021)."""

from .algorithm import AsyncLearner

__all__ = ["AsyncLearner"]
