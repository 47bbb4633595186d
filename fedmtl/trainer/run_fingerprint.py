"""The fingerprint of a run: digests of all that its releases depend on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._fingerprint import fingerprint_of
from ..algorithms.base import Problem
from ..models.networks import NamedFactory
from ..privacy import NoiseSource

if TYPE_CHECKING:
    from .trainer import Trainer


ARITHMETIC = 13
"""Raised by every version whose local training or sums have other last bits for the same settings,
or whose noise has.

With the same seed two versions whose sums differ by rounding add the same noise to them, so that
their releases would jointly show that difference; two whose noise differs make two releases of one
sum. Neither are one release."""


def fingerprint(problem: Problem, settings: Trainer, coins: NoiseSource | None = None) -> str:
    """Returns digests of everything that the released numbers depend on: data, settings, start,
    seed and execution.

    A release repeated under the same digest is the same release; under another it would be a new
    one.

    Args:
        problem: the data that are trained on, the model and the executor.
        settings: of the run.
        coins: source of the noise and the cohorts, in place of the seed's.
    """
    alike = problem.initial.device.type == "cpu"
    parts = {
        "data": problem.data.fingerprint(),
        "algorithm": describe(settings.algorithm),
        "privacy": describe(settings.privacy),
        "schedule": describe(settings.schedule),
        "model": repr(problem.module),
        "trainable parameters": list(zip(problem.layout.names, problem.layout.shapes, strict=True)),
        "starting point": _digest(problem.initial),
        "loss": describe(problem.loss),
        "rounds": problem.rounds,
        "seed": problem.seed,
        "execution": problem.executor.chunk,
        "threads": torch.get_num_threads(),
        "device": problem.initial.device.type,
        "dtype": str(problem.initial.dtype),
        "version of torch": torch.__version__,
        "arithmetic": ARITHMETIC,
    }
    frozen = problem.layout.frozen(problem.module)
    if frozen:
        parts["frozen parameters"] = {name: _digest(value) for name, value in frozen.items()}
    # Settings that most runs lack have no entry, so that their digests stay those of older runs.
    if settings.runs > 1:
        parts["replicates"] = describe((settings.replicates, settings.epsilons))
    if coins is not None:
        parts["coins"] = describe(coins)
    if settings.audit is not None:
        parts["audit"] = describe(settings.audit)
    # Operations of one thread on a CPU give the same bits in any number of processes.
    if problem.ranks.size > 1 and not (alike and torch.get_num_threads() == 1):
        parts["ranks"] = problem.ranks.size
    return fingerprint_of(parts)


def describe(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """Returns a description of settings that is ready for JSON.

    Dataclasses are described by class and fields, factories of :mod:`fedmtl.models` by function and
    settings, arrays by a digest, functions by their qualified name, the caller's own also by their
    code and by the values that they are bound to or close over, other objects by class and
    attributes.

    Args:
        value: a setting.
        within: the objects of which ``value`` is an attribute, directly or not; one that comes
            again is named only.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: describe(getattr(value, f.name), within) for f in dataclasses.fields(value)
        }
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, NamedFactory):
        return {"class": value.func.__name__, **describe(value.keywords, within)}
    if isinstance(value, Mapping):
        return {str(k): describe(v, within) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [describe(v, within) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return _digest(value)
    qualified = getattr(value, "__qualname__", type(value).__qualname__)
    name = f"{getattr(value, '__module__', '')}.{qualified}"
    # An object that refers to itself would be described without an end.
    if any(value is outer for outer in within):
        state = {}
    else:
        state = _state(value)
    if state:
        return name + json.dumps(describe(state, (*within, value)), sort_keys=True)
    return name


def _state(value: Any) -> dict[str, Any]:
    """Returns the state that distinguishes two functions or objects of one name."""
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": value.args, **value.keywords}
    if isinstance(value, types.MethodType):
        return {"object": value.__self__}
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts: dict[str, Any] = {
            "closure": cells,
            "defaults": value.__defaults__,
            "keywords": value.__kwdefaults__,
        }
        parts["code"] = _code(value.__code__) if _foreign(value) else None
        return {name: part for name, part in parts.items() if part}
    if isinstance(value, type):
        return {}
    # Two versions of a class of the caller's may have the same name and other methods.
    if _foreign(type(value)):
        methods = vars(type(value)).items()
    else:
        methods = ()
    codes = {
        f"{name}()": _code(method.__code__)
        for name, method in methods
        if isinstance(method, types.FunctionType)
    }
    return {**getattr(value, "__dict__", {}), **codes}


def _foreign(value: Any) -> bool:
    """Returns True if a function or class is the caller's own: the code of the packages has a
    version."""
    return str(value.__module__).split(".")[0] not in ("fedmtl", "torch", "numpy")


def _code(code: types.CodeType) -> str:
    """Returns a digest of a function's code, without the globals that it reads."""
    # A set of constants has another order in every process.
    ordered = (
        sorted(map(repr, part)) if isinstance(part, frozenset) else part for part in code.co_consts
    )
    constants = [
        _code(part) if isinstance(part, types.CodeType) else repr(part) for part in ordered
    ]
    parts = (code.co_code, repr(code.co_names).encode(), repr(constants).encode())
    return hashlib.blake2b(b"|".join(parts), digest_size=16).hexdigest()


def _digest(values: Tensor | np.ndarray) -> str:
    if isinstance(values, Tensor):
        array = values.detach().cpu().numpy()
    else:
        array = values
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
