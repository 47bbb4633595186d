"""The audit of whole runs: the transcript, what is each client's own, starts, stops, and the release path."""

from .suite import audit_trainer

__all__ = ["audit_trainer"]
