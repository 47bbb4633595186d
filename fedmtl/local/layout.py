"""The trainable tensors of a module in one row of numbers, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ModelError


@dataclass(frozen=True)
class Layout:
    """The places of a module's trainable tensors in a flat row of D numbers.

    Tied weights appear once, and can be named by each of their names. Tensors with
    ``requires_grad=False`` are frozen: they do not appear, are public with the module, and are one
    tensor for all clients. This class alone decides which parameters are trained: clip, noise,
    releases and the clients' own tensors have the D numbers of a row.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedmtl.local import Layout
        >>> module = nn.Linear(3, 2)
        >>> layout = Layout.of(module)
        >>> layout.dimension, layout.names
        (8, ('weight', 'bias'))
        >>> {name: tuple(view.shape) for name, view in layout.views(torch.zeros(5, 8)).items()}
        {'weight': (5, 2, 3), 'bias': (5, 2)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    all_names: tuple[tuple[str, ...], ...]
    dimension: int

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """Returns the layout of a module's trainable parameters.

        Args:
            module: whose parameters with ``requires_grad`` come in the order of
                ``named_parameters``.

        Returns:
            A layout of D numbers; a tied weight stands in it once.
        """
        # A tied weight is one parameter of the row, whatever its number of names.
        named = [(names, p) for names, p in _by_all_names(module) if p.requires_grad]
        offsets = [0]
        for _, p in named:
            offsets.append(offsets[-1] + p.numel())
        all_names = tuple(names for names, _ in named)
        shapes = tuple(tuple(p.shape) for _, p in named)
        return cls(
            tuple(names[0] for names in all_names), shapes, tuple(offsets), all_names, offsets[-1]
        )

    def places(self, patterns: Sequence[str], owner: str) -> Tensor:
        """Returns the parameters that belong to one of some patterns, as a mask.

        Args:
            patterns: names of parameters or of modules, such as ``"fc"`` for ``fc.weight`` and
                ``fc.bias``; ``*``, ``?`` and ``[...]`` match as in names of files.
            owner: the setting that they come from, for the message.

        Returns:
            bool (D,).

        Raises:
            ConfigError: no sequence, an empty one, or a pattern without a parameter.
        """
        chosen = torch.tensor(named_by(patterns, self.all_names, owner))
        return chosen.repeat_interleave(torch.tensor(self.offsets).diff())

    def frozen(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the tensors of a module's state that are not trained.

        Args:
            module: of this layout.

        Returns:
            The tensors by name, not copied; they are public with the module.
        """
        named = dict(module.named_parameters())
        # By address, since a state names tied weights several times.
        # tied weights have several names in a state
        moving = {named[name].data_ptr() for name in self.names}
        state = {
            name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)
        }
        return {name: value for name, value in state.items() if value.data_ptr() not in moving}

    @property
    def last(self) -> str:
        """Returns the name of the module that holds the last parameter, or of that parameter if its
        module has no name."""
        return self.names[-1].rpartition(".")[0] or self.names[-1]

    def flatten(self, module: nn.Module) -> Tensor:
        """Returns a module's trainable parameters as one row.

        Args:
            module: of this layout.

        Returns:
            (D,), a copy, in the dtype of the parameters.
        """
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns views of the parameters in rows.

        Args:
            rows: (D,), or (K, D) for K models.

        Returns:
            (*shape) or (K, *shape) by name; writing to one changes ``rows``.
        """
        lead = rows.shape[:-1]
        return {
            name: rows.narrow(-1, a, b - a).view((*lead, *shape))
            for name, shape, a, b in zip(
                self.names, self.shapes, self.offsets, self.offsets[1:], strict=False
            )
        }

    def load(self, module: nn.Module, row: Tensor) -> nn.Module:
        """Copies a row into a module's parameters, in place.

        Args:
            module: of this layout.
            row: (D,) of any floating dtype and device.

        Returns:
            The module.
        """
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.views(row).items():
                named[name].copy_(value)
        return module


def belongs(name: str, pattern: str) -> bool:
    """Returns true for a parameter or module that the pattern names, or that lies within one that
    it names."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def check_names(owner: object, field: str, names: Any) -> None:
    """Refuses a value of an algorithm's ``field`` for names of layers that is no list of names.

    Args:
        owner: the settings that have the names.
        field: by which they have them.
        names: the value of the field, of any type.

    Raises:
        ConfigError: naming the class of ``owner``.

    Example:
        >>> from fedmtl.errors import ConfigError
        >>> from fedmtl.local import check_names
        >>> try:
        ...     check_names(object(), "layers", "fc")
        ... except ConfigError as error:
        ...     print(error)
        object.layers is 'fc'; give a list of names, such as ['fc'].
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(
            f"{type(owner).__name__}.{field} is {names!r}; give a list of names, such as ['fc']."
        )


def named_by(
    patterns: Any, names: Sequence[Sequence[str]], owner: str, kind: str = "parameter"
) -> list[bool]:
    """Returns a mask of the parameters, or layers, that a pattern names, or a module around them.

    Args:
        patterns: names, in which ``*``, ``?`` and ``[...]`` match as in names of files.
        names: all names of each of them.
        owner: the setting that the patterns come from, for the message.
        kind: the noun for them in messages.

    Raises:
        ConfigError: no sequence, an empty one, or a pattern that is not text or names none of them.

    Example:
        >>> from fedmtl.local import named_by
        >>> names = [("body.weight",), ("body.bias",), ("head.weight",)]
        >>> named_by(["body", "*.weight"], names, "trainable")
        [True, True, True]
        >>> named_by(["head"], names, "trainable")
        [False, False, True]
    """
    accepted = [name for each in names for name in each]
    listed = f"the model's {kind}s are {', '.join(accepted) or 'none'}"
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        hint = [next(iter(accepted), "head.*")]
        if isinstance(patterns, str):
            hint = [patterns]
        raise ConfigError(
            f"{owner} is {patterns!r}; give a list of names, such as {hint}; {listed}."
        )
    if not patterns:
        raise ConfigError(f"{owner} is empty, so that it names none; {listed}.")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{owner} has {pattern!r}, which is not text (write '{pattern}'); {listed}."
            )
        if not any(belongs(name, pattern) for name in accepted):
            raise ConfigError(f"{owner} has {pattern!r}, which no {kind} is named by; {listed}.")
    return [any(belongs(name, pattern) for name in each for pattern in patterns) for each in names]


def _by_all_names(module: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Returns every parameter once, in the order of ``named_parameters``, with all names that it
    has as a tied weight."""
    by_identity: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [(tuple(names), parameter) for names, parameter in by_identity.values()]


def set_trainable(module: nn.Module, patterns: Sequence[str] | None) -> None:
    """Sets ``requires_grad`` of every parameter, in place: True if a pattern names it, and
    nowhere else.

    Args:
        module: whose parameters are chosen.
        patterns: names of parameters or modules, as :meth:`Layout.places` takes them, of a tied
            weight any of its names; None leaves the module as it is.

    Raises:
        ConfigError: no sequence, an empty one, or a pattern that is not text or has no parameter.
        ModelError: a module that is left as it is has no trainable parameter.
    """
    floating = [(names, p) for names, p in _by_all_names(module) if p.is_floating_point()]
    if patterns is None:
        if not any(p.requires_grad for _, p in floating):
            listed = ", ".join(name for names, _ in floating for name in names)
            if not listed:
                raise ModelError(
                    "The model has no parameter of real numbers to train; of a quantized model "
                    "give the one that it was made from."
                )
            raise ModelError(
                f"The model has no trainable parameter: all are frozen, and trainable is None; "
                f"the model's parameters are {listed}. Unfreeze some with requires_grad_(True), "
                f"or name some in trainable=[...]."
            )
        return
    chosen = named_by(patterns, [names for names, _ in floating], "trainable")
    # Everything else is frozen, buffers and whole-number parameters among them.
    module.requires_grad_(False)
    for moves, (_, parameter) in zip(chosen, floating, strict=True):
        parameter.requires_grad_(moves)
