"""Errors that speak to the user: their message has the fault, its place and the accepted values."""

from __future__ import annotations


class FedmtlError(Exception):
    """Base of every error meant for the user; the command line prints its text without a
    traceback."""


class DataError(FedmtlError, ValueError):
    """Input data is malformed; the message names the file, the client and the field."""


class ConfigError(FedmtlError, ValueError):
    """A setting has an impossible value; the message names the setting and the accepted values."""


class MissingExtra(FedmtlError, ImportError):
    """A package of an extra is not installed; the message has the line for pip."""


class ModelError(FedmtlError, ValueError):
    """A model cannot be personalized as it stands; the message names the layer."""


class PrivacyError(FedmtlError, ValueError):
    """A combination of sampling, clipping, noise and observer that no accountant supports."""


class ResumeError(FedmtlError, RuntimeError):
    """A run folder cannot be resumed as asked."""


class TrainingError(FedmtlError, RuntimeError):
    """Training cannot go on: a result is not finite, no client is connected, or a file cannot be
    written."""


class SecureSumError(FedmtlError, RuntimeError):
    """A message of a secure sum is refused, or too few clients are left to open the sum."""


class BudgetExhausted(FedmtlError, RuntimeError):
    """The next release would exceed the privacy budget; raised before any data is read for it."""


def first_line(error: BaseException) -> str:
    """Returns an error's first line, without its full stop; the name of its class if it has no
    text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
