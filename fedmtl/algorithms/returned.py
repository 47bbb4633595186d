"""Checks of the values that the functions of a method return: a mistake is named, and no state is
changed in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import ConfigError, PrivacyError
from ..privacy import GradientPlan, ReleasePlan
from .client_batch import ClientBatch
from .store import ClientStore


@contextmanager
def unchanged(function: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuses a change in place of tensors that all clients read while a function of a method runs.

    Such a change is no release: it would carry data of clients to the server and to others. It
    would also change the earlier states from which clients under ``Buffered`` start.

    Args:
        function: its name, for the message.
        tensors: the public state, or the model before finetuning, by name.

    Raises:
        PrivacyError: a tensor was changed.
    """
    # PyTorch counts the changes of a tensor and of its views, but not those of inference mode
    before = {
        name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()
    }
    yield
    for name, version in before.items():
        if tensors[name]._version != version:
            raise PrivacyError(
                f"{function} changes {name!r} in place, which all clients read: data would pass "
                "without a release. Compute a new tensor."
            )


def checked_plans(method: str, plans: Any) -> tuple[ReleasePlan | GradientPlan, ...]:
    """Returns the plans of a method.

    Args:
        method: its name.
        plans: the value that its ``plan`` returned.

    Raises:
        ConfigError: they are no sequence of plans.
    """
    kinds = (ReleasePlan, GradientPlan)
    if not isinstance(plans, Sequence) or not all(isinstance(plan, kinds) for plan in plans):
        expected = "a sequence of plans, such as (ReleasePlan(name='update', dimension=D),)"
        raise ConfigError(f"{method}.plan returns {_kind(plans)}; it must return {expected}.")
    return tuple(plans)


def checked_update(method: str, c: ClientBatch, returned: Any) -> tuple[Mapping[str, Tensor], Any]:
    """Returns the messages and the new states of a batch of clients.

    Args:
        method: its name.
        c: the clients that were computed.
        returned: the value that its ``client_update`` returned.

    Raises:
        ConfigError: it is no pair of messages and states, a declared release has no message, or a
            state does not fit the store.
        PrivacyError: a message has no row for each client.
    """
    function = f"{method}.client_update"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(
            f"{function} returns {_kind(returned)}; it must return a pair: the messages "
            "{name of the release: rows}, and the clients' new states, such as c.states."
        )
    messages, states = returned
    messages = checked_tensors(function, "messages", messages)
    for name, rows in messages.items():
        if rows.ndim < 2:
            raise PrivacyError(
                f"Release {name!r} takes float rows of shape (k, D), not {tuple(rows.shape)} of "
                f"{rows.dtype}."
            )
        if rows.shape[-2] != len(c.clients):
            raise PrivacyError(
                f"Release {name!r} needs one row from each client, and each client once: "
                f"{function} returns {rows.shape[-2]} rows of {len(c.clients)} clients."
            )
    missing = [name for name in c.clips if name not in messages]
    if missing:
        sent = ", ".join(map(repr, messages)) or "none"
        raise ConfigError(
            f"{function} returns no rows of the release {missing[0]!r}, which its plan declares; "
            f"it returns: {sent}."
        )
    return messages, checked_states(function, c, states)


def checked_states(function: str, c: ClientBatch, states: Any) -> dict[str, Tensor]:
    """Returns the new states of a batch of clients.

    Args:
        function: name of the one that returned them.
        c: the clients, with their states before.
        states: by name; None for none.

    Raises:
        ConfigError: they do not fit the store.
    """
    if states is None:
        return {}
    states = checked_tensors(function, "states", states)
    for name, rows in states.items():
        if name not in c.states:
            fields = ", ".join(c.states) or "no field"
            raise ConfigError(
                f"{function} returns states {name!r}, but the clients' store has {fields}."
            )
        if rows.shape != c.states[name].shape:
            raise ConfigError(
                f"{function} returns states {name!r} of shape {tuple(rows.shape)}; those of these "
                f"{len(c.clients)} clients are {tuple(c.states[name].shape)}."
            )
    return states


def checked_models(function: str, models: Any, clients: int, dimension: int) -> Tensor:
    """Returns the models of clients.

    Args:
        function: name of the one that returned them.
        models: the models.
        clients: k.
        dimension: D.

    Raises:
        ConfigError: they are no tensor (k, D).
    """
    if not isinstance(models, Tensor) or models.shape != (clients, dimension):
        raise ConfigError(
            f"{function} returns {_kind(models)}; it must return a tensor "
            f"({clients}, {dimension}), a model for each client."
        )
    return models


def check_state(method: str, state: Any, kind: type) -> None:
    """Checks the state before the first step.

    Args:
        method: its name.
        state: the value that its ``init`` returned.
        kind: the class of states.

    Raises:
        ConfigError: it is no state.
    """
    function = f"{method}.init"
    if not isinstance(state, kind) or not isinstance(getattr(state, "private", None), ClientStore):
        raise ConfigError(
            f"{function} returns {_kind(state)}; it must return State(public, private), such as "
            "State({'global': problem.initial}, problem.client_store({}))."
        )
    checked_tensors(function, "a public state", getattr(state, "public", None))


def checked_tensors(function: str, noun: str, values: Any) -> dict[str, Tensor]:
    """Returns tensors by name, such as a public state.

    Args:
        function: name of the one that returned them.
        noun: for the message.
        values: the tensors.

    Raises:
        ConfigError: they are no mapping of tensors.
    """
    expected = "a mapping {name: tensor}"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{function} returns as {noun} {_kind(values)}; it must be {expected}.")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{function} returns as {noun} {_kind(value)} under {name!r}; it must be a tensor."
            )
    return dict(values)


def _kind(value: Any) -> str:
    """Returns the kind of a value in words, without its numbers."""
    if value is None:
        return "nothing"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return f"a {type(value).__name__}"
