"""The file of a model: its complete state; frozen, tied and bounded parts stand in the metadata."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from ..algorithms.problem import Problem
from ..data import RowBound
from .tensor_files import write_tensors


def bound_note(bound: RowBound | None) -> dict[str, str]:
    """Returns the metadata of the models of an algorithm that bounds features; empty without a
    bound."""
    if bound is None:
        return {}
    return {"bound": json.dumps(asdict(bound))}


def write_model(path: Path, problem: Problem, row: Tensor, metadata: Mapping[str, str]) -> None:
    """Writes the complete state of a model, with ``metadata`` and those of :func:`model_state`.

    Args:
        path: of the file.
        problem: with the module and its layout.
        row: (D,), the parameters that are trained.
        metadata: texts by name.
    """
    state, names = model_state(problem, row)
    write_tensors(path, state, {**metadata, **names})


def model_state(problem: Problem, row: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the complete state of a model, as ``load_state_dict`` takes it, and its metadata.

    The metadata have ``frozen``, the names of frozen tensors, and ``tied``, every further name of a
    tied tensor with its first one; each only if there are any.

    Args:
        problem: with the module and its layout.
        row: (D,), the parameters that are trained.
    """
    module = problem.layout.load(copy.deepcopy(problem.module).to(dtype=row.dtype), row)
    # A state may hold the value of get_extra_state: no tensor, the same for all, and in the code.
    whole = module.state_dict()
    state = {name: value.clone() for name, value in whole.items() if isinstance(value, Tensor)}
    frozen = list(problem.layout.frozen(module))
    tied = {
        name: first
        for first, *others in problem.layout.all_names
        for name in others
        if name in state
    }
    return state, {
        key: json.dumps(value) for key, value in (("frozen", frozen), ("tied", tied)) if value
    }
