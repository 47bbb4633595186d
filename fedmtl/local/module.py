"""K copies of a module whose parameters are one [K, D] storage with named leaf views, and what it must be for that."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError, ModelError, first_line
from ..random import derive_key, keyed_uniform
from .convolutions import ConvolutionalNetwork
from .products import Perceptron

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: spreads local steps over keys
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KeyedDropout(nn.Module):
    """Inverted dropout on a counter-based generator; the stacked twin of ``nn.Dropout``.

    The mask does not depend on which clients are computed in one batch, nor on the padding of a batch: element ``j`` of
    example ``i`` of one client has the counter ``(first + i) * numel(example) + j``.

    Args:
        p: probability that an element is zeroed, in ``[0, 1]``.
        key: 64-bit key of this layer.
        channelwise: zero whole channels, like ``nn.Dropout2d``.

    Shape:
        Input (B, ...), output the same. ``address`` is an int64 buffer (3,): client key, round, local step; ``first``,
        an int64 buffer (), numbers the first example of the batch.
    """

    address: Tensor
    first: Tensor

    def __init__(self, p: float, *, key: int, channelwise: bool = False) -> None:
        super().__init__()
        self.p, self.key, self.channelwise = p, key - (1 << 64) * (key >= 1 << 63), channelwise  # a signed number
        self.register_buffer("address", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("first", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channelwise else x.shape
        size = math.prod(shape[1:])
        index = torch.arange(shape[0] * size, device=x.device) + self.first * size
        client, step, local = self.address.unbind(-1)
        key = local * _GOLDEN + self.key
        stays = keyed_uniform(key, client, step, index).reshape(shape) >= self.p
        return torch.where(stays, x / (1.0 - self.p) if self.p < 1.0 else x, x.new_zeros(()))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def swap_dropout(module: nn.Module, seed: int) -> None:
    """Replace, in place, every ``nn.Dropout``, ``Dropout1d/2d/3d`` by a :class:`KeyedDropout` keyed by its name."""
    for name, child in list(module.named_modules()):
        if isinstance(child, (nn.Dropout, *_CHANNELWISE)) and name:
            parent = module.get_submodule(name.rpartition(".")[0])
            keyed = KeyedDropout(
                child.p, key=derive_key(seed, f"dropout/{name}"), channelwise=isinstance(child, _CHANNELWISE)
            )
            setattr(parent, name.rpartition(".")[2], keyed)


_ALIGNED = 16


@dataclass(frozen=True)
class Layout:
    """Where each trainable tensor of a module stands in a flat row of D numbers.

    Tied weights appear once, and can be named by each of their names. Tensors with ``requires_grad=False`` are frozen:
    they do not appear, are public with the module, and are one tensor for all clients. This is the one place that says
    what moves: clip, noise, releases and the clients' own tensors have the D numbers of a row.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    all_names: tuple[tuple[str, ...], ...]
    dimension: int

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The layout of a module's trainable parameters, in the order of ``named_parameters``."""
        named = [(names, p) for names, p in _by_all_names(module) if p.requires_grad]
        offsets = [0]
        for _, p in named:
            offsets.append(offsets[-1] + p.numel())
        all_names = tuple(names for names, _ in named)
        shapes = tuple(tuple(p.shape) for _, p in named)
        return cls(tuple(names[0] for names in all_names), shapes, tuple(offsets), all_names, offsets[-1])

    def places(self, patterns: Sequence[str], owner: str) -> Tensor:
        """(D,) bool: which of the flat parameters belong to one of the patterns.

        Args:
            patterns: names of parameters or of modules, such as ``"fc"`` for ``fc.weight`` and ``fc.bias``; ``*``,
                ``?`` and ``[...]`` stand for what they do in names of files.
            owner: the setting that they come from, for the message.

        Raises:
            ConfigError: no sequence, an empty one, or a pattern without a parameter.
        """
        chosen = torch.tensor(named_by(patterns, self.all_names, owner))
        return chosen.repeat_interleave(torch.tensor(self.offsets).diff())

    def frozen(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors of the module's state that are none of these parameters, by name: what is public with it."""
        named = dict(module.named_parameters())
        moving = {named[name].data_ptr() for name in self.names}  # tied weights have several names in a state
        return {name: value for name, value in module.state_dict().items() if value.data_ptr() not in moving}

    @property
    def last(self) -> str:
        """The module that holds the last parameter, or that parameter, where it belongs to no module of a name."""
        return self.names[-1].rpartition(".")[0] or self.names[-1]

    def flatten(self, module: nn.Module) -> Tensor:
        """The module's trainable parameters as a new (D,) tensor."""
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Named views into ``rows``: (K, D) -> {name: (K, *shape)}; (D,) -> {name: shape}."""
        lead = rows.shape[:-1]
        return {
            name: rows[..., a:b].view(*lead, *shape)
            for name, shape, a, b in zip(self.names, self.shapes, self.offsets, self.offsets[1:], strict=False)
        }

    def load(self, module: nn.Module, row: Tensor) -> nn.Module:
        """Copy a (D,) row into the module's parameters, in place; returns the module."""
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.views(row).items():
                named[name].copy_(value)
        return module


def belongs(name: str, pattern: str) -> bool:
    """Return whether a parameter or module of this name is one that the pattern names, or lies within one."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def check_names(owner: object, field: str, names: Any) -> None:
    """Refuse what an algorithm has as its ``field`` for names of layers and is no list of them.

    Raises:
        ConfigError: naming the class of ``owner``.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{type(owner).__name__}.{field} is {names!r}; give a list of names, such as ['fc'].")


def named_by(patterns: Any, names: Sequence[Sequence[str]], owner: str, what: str = "parameter") -> list[bool]:
    """Return which parameters, or layers, a pattern names, or a module that they lie within.

    Args:
        patterns: names, where ``*``, ``?`` and ``[...]`` stand for what they do in names of files.
        names: all names of each of them.
        owner: the setting that the patterns come from, for the message.
        what: they are, for the message.

    Raises:
        ConfigError: no sequence, an empty one, or a pattern that is not text or names none of them.
    """
    accepted = [name for each in names for name in each]
    listed = f"the model's {what}s are {', '.join(accepted) or 'none'}"
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        hint = [patterns] if isinstance(patterns, str) else [next(iter(accepted), "head.*")]
        raise ConfigError(f"{owner} is {patterns!r}; give a list of names, such as {hint}; {listed}.")
    if not patterns:
        raise ConfigError(f"{owner} is empty, so that it names none; {listed}.")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"{owner} has {pattern!r}, which is not text (write '{pattern}'); {listed}.")
        if not any(belongs(name, pattern) for name in accepted):
            raise ConfigError(f"{owner} has {pattern!r}, which no {what} is named by; {listed}.")
    return [any(belongs(name, pattern) for name in each for pattern in patterns) for each in names]


def _by_all_names(module: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Every parameter once, in the order of ``named_parameters``, with all names that it has as a tied weight."""
    by_identity: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [(tuple(names), parameter) for names, parameter in by_identity.values()]


def set_trainable(module: nn.Module, patterns: Sequence[str] | None) -> None:
    """Set ``requires_grad`` of every parameter, in place: true where a pattern names it, and nowhere else.

    Args:
        module: whose parameters are chosen.
        patterns: names of parameters or modules, as :meth:`Layout.places` takes them, of a tied weight any of its
            names; None leaves the module as it is.

    Raises:
        ConfigError: no sequence, an empty one, a pattern that is not text or has no parameter; of a module as it is, no
            trainable parameter.
    """
    floating = [(names, p) for names, p in _by_all_names(module) if p.is_floating_point()]
    if patterns is None:
        if not any(p.requires_grad for _, p in floating):
            listed = ", ".join(name for names, _ in floating for name in names) or "none"
            raise ModelError(
                f"The model has no trainable parameter: all are frozen, and trainable is None; the model's parameters "
                f"are {listed}."
            )
        return
    chosen = named_by(patterns, [names for names, _ in floating], "trainable")
    module.requires_grad_(False)
    for moves, (_, parameter) in zip(chosen, floating, strict=True):
        parameter.requires_grad_(moves)


class StackedModule:
    """K copies of one module, computed and differentiated as one batch.

    The trainable parameters live in one buffer ``rows`` (capacity, D), allocated once and reused. The losses of
    different copies are independent, so the gradient of their sum holds each copy's own gradient, and clip, proximal
    step, distance to an anchor and aggregation are single operations on rows. Frozen parameters are not batched: they
    are the given module's own tensors, and what stands before the first trainable parameter is neither differentiated
    nor kept.

    Args:
        module: prepared by :func:`fedmtl.local.prepare_module`; its structure is copied, and its parameters only
            where they are on another device or in another dtype.
        capacity: number of copies to allocate; grows when more are loaded.
        device, dtype: of parameters and computation.

    Attributes:
        has_dropout: whether :meth:`forward` needs an ``address`` per copy.
    """

    def __init__(self, module: nn.Module, *, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        like = torch.empty(0, device=device, dtype=dtype)  # "cuda" is the current one of several devices
        tensors = (*module.parameters(), *module.buffers())
        if any(t.device != like.device or (t.is_floating_point() and t.dtype != dtype) for t in tensors):
            module = copy.deepcopy(module).to(device=device, dtype=dtype)
        same = {id(parameter): parameter for parameter in module.parameters()}  # which the copies share
        self.train_module, self.eval_module = (copy.deepcopy(module, dict(same)).train(mode) for mode in (True, False))
        self.layout = Layout.of(self.train_module)
        self.network = Perceptron.of(self.train_module, self.layout) or ConvolutionalNetwork.of(
            self.train_module, self.layout
        )
        self._dropouts = [n for n, m in self.train_module.named_modules() if isinstance(m, KeyedDropout)]
        self.has_dropout = bool(self._dropouts)
        self._allocate(like, capacity)

    def _allocate(self, like: Tensor, capacity: int) -> None:
        """Make the buffers: each row begins at the same alignment in memory, where products and sums are fastest and
        round alike."""
        padded = -(-self.layout.dimension // _ALIGNED) * _ALIGNED
        self.rows = like.new_zeros(capacity, padded)[:, : self.layout.dimension]

    def load(self, start: Tensor, count: int, *, place: Tensor | None = None) -> Tensor:
        """Set the first ``count`` copies to ``start``, (D,) or (count, D); returns that (count, D) view of ``rows``.

        With ``place``, int64 (count,), copy i is set to row ``place[i]`` of ``start`` (n, D).
        """
        if count > len(self.rows):
            self._allocate(self.rows, count)
        rows = self.rows[:count]
        if start.dim() == 2 and place is not None:
            torch.index_select(start, 0, place.to(start.device), out=rows)
        else:
            rows.copy_(start if start.dim() == 2 else start.expand(count, -1))
        return rows

    def forward(self, x: Tensor, *, address: Tensor | None = None) -> Tensor:
        """Training-mode outputs of the first K copies on their own batches.

        Args:
            x: (K, B, ...).
            address: int64 (K, 3), client key, round and local step, for keyed dropout.

        Returns:
            (K, B, ...), differentiable with respect to the copies' parameters.
        """
        views = self.layout.views(self.rows[: len(x)])
        self._leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        return self._call(self.train_module, self._leaves, x, address)

    def backward(self, losses: Tensor) -> Tensor:
        """Return the gradient of ``losses.sum()`` by the copies' parameters, (K, D).

        Args:
            losses: (K,), one loss a copy, from :meth:`forward` on the same K.
        """
        leaves = list(self._leaves.values())
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.reshape(len(losses), -1) for gradient in gradients], 1)

    @torch.no_grad()
    def predict(self, rows: Tensor, x: Tensor) -> Tensor:
        """Evaluation-mode outputs.

        Args:
            rows: (K, D) parameters, one row a copy.
            x: (K, B, ...).

        Returns:
            (K, B, ...).
        """
        return self._call(self.eval_module, self.layout.views(rows), x, None)

    def dropout_buffers(self, address: Tensor | None, first: Tensor | None = None) -> dict[str, Tensor]:
        """The buffers of the dropout layers, by name, for a functional call; see :class:`KeyedDropout`."""
        inputs = {"address": address, "first": first}
        return {
            f"{name}.{buffer}": value
            for name in self._dropouts
            for buffer, value in inputs.items()
            if value is not None
        }

    def _call(self, module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, address: Tensor | None) -> Tensor:
        stacked = dict(tensors) | self.dropout_buffers(address)
        if x.shape[0] == 1:  # one copy needs no batching rule: ordinary kernels are faster
            single = {name: value.squeeze(0) for name, value in stacked.items()}
            return functional_call(module, single, (x.squeeze(0),)).unsqueeze(0)
        return vmap(lambda values, batch: functional_call(module, values, (batch,)))(stacked, x)


def prepare_module(
    module: nn.Module,
    sample: Tensor,
    *,
    seed: int,
    outputs: int | None = None,
    dtype: torch.dtype | None = None,
    trainable: Sequence[str] | None = None,
) -> nn.Module:
    """Return a copy of ``module`` ready for stacking: checked, with keyed dropout, in training mode, in the sample's
    dtype.

    Args:
        module: any module whose forward takes one batch tensor.
        sample: a batch of the right shape (B, ...) whose values do not matter.
        seed: keys the dropout masks.
        dtype: of the parameters; ``None`` for that of the sample.
        outputs: numbers that the model must return for an example; ``None`` skips the check.
        trainable: names of the parameters that are trained, all others are frozen, see :func:`set_trainable`; ``None``
            for those with ``requires_grad``.

    Raises:
        ConfigError: ``trainable`` does not fit the module.
        ModelError: batch normalization, buffers that change in training mode, random operations outside
            ``nn.Dropout`` modules, no trainable parameter, or an output of the wrong shape.
    """
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            channels = child.num_features
            vectors = isinstance(child, nn.BatchNorm1d)  # a group with a single number of them would be constant
            groups = 1 if vectors else next(count for count in (8, 4, 2, 1) if channels % count == 0)
            raise ModelError(
                f"Layer {name or type(child).__name__!r} is {type(child).__name__}: its running statistics mix clients "
                f"and leave them without noise. Use torch.nn.GroupNorm (for example GroupNorm({groups}, "
                f"{channels})) instead; model.fix=true, in Python models.fix(model), does so."
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(child, option):
                    raise ModelError(
                        f"Layer {name!r} is {type(child).__name__} with {option}={getattr(child, option)}, which mixes"
                        f" the examples of a batch; leave {option} out."
                    )
    ready = copy.deepcopy(module).to(sample.device, sample.dtype if dtype is None else dtype).train()
    set_trainable(ready, trainable)
    swap_dropout(ready, seed)
    before = {name: buffer.clone() for name, buffer in ready.named_buffers()}
    try:
        with torch.no_grad(), _RefuseRandomness():
            result = ready(sample)
    except Exception as error:
        if isinstance(error, ModelError):
            raise
        hint = ""
        if "indices" in str(error) and sample.is_floating_point():
            hint = "; embeddings take whole numbers, which data keep with transform=Integers()"
        kind = "" if sample.is_floating_point() else " of whole numbers"
        text = repr(error) if isinstance(error, KeyError) else str(error)
        raise ModelError(
            f"The model fails on a batch{kind} of shape {tuple(sample.shape)}, the shape of this data: {text}{hint}"
        ) from error
    for name, buffer in ready.named_buffers():
        if not torch.equal(before[name], buffer):
            raise ModelError(
                f"Buffer {name!r} changes during the forward pass; a changing buffer would leave the client without "
                "noise. Remove it, or use a layer without running statistics."
            )
    is_batch = isinstance(result, Tensor) and result.shape[:1] == sample.shape[:1]
    if not is_batch or (outputs is not None and result.shape[1:] != (outputs,)):
        what = (
            f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        )
        shape = "(B, ...)" if outputs is None else f"(B, {outputs}), since the data has {outputs} classes or labels"
        raise ModelError(f"The model must map (B, ...) to one tensor {shape}; it returned {what}.")
    return ready


def check_stackable(module: nn.Module, sample: Tensor) -> None:
    """Refuse a module whose copies cannot be computed as one batched program (:func:`torch.func.vmap`).

    Args:
        module: from :func:`prepare_module`.
        sample: as there.

    Raises:
        ModelError: an operation without a batching rule, or one whose course depends on values.
    """
    kind = next(module.parameters()).dtype
    stack = StackedModule(module, capacity=2, device=sample.device, dtype=kind)
    both = sample.expand(2, *sample.shape)
    start = stack.layout.flatten(module)
    address = torch.zeros(2, 3, dtype=torch.int64) if stack.has_dropout else None
    try:
        rows = stack.load(start, 2)
        stack.backward(stack.forward(both, address=address).reshape(2, -1).sum(1))
        stack.predict(rows, both)
    except UNBATCHED as error:
        raise not_batched(error) from error


UNBATCHED = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What :func:`torch.func.vmap` raises of an operation that it has no rule for."""


def not_batched(error: Exception) -> ModelError:
    """Return the refusal of a module that :func:`torch.func.vmap` does not take, for its ``error``."""
    reason = " ".join(str(error).split(". ")[0].split())[:200]
    return ModelError(
        f"The model cannot be computed for several clients at once ({reason}); use layers that torch.func.vmap "
        "takes (model.fix=true, in Python models.fix(model), replaces recurrent layers and attention), or "
        "execution={chunk: 1}, in Python Execution(chunk=1), which computes one client after another."
    )


def check_copyable(module: nn.Module) -> None:
    """Refuse a module whose parameters cannot be exchanged for those of a client, or are no start of training.

    Raises:
        ModelError: a module of ``torch.jit``, ``torch.compile`` or ``nn.DataParallel``, one that cannot be copied, or a
            parameter without data, of complex numbers, or that is not finite.
    """
    for name, child in module.named_modules():
        where = f"Layer {name!r}" if name else "The model"
        kind = next((kind for kind in _WRAPPED if kind in [each.__name__ for each in type(child).__mro__]), None)
        if kind is not None:
            raise ModelError(f"{where} is of class {type(child).__name__}, {_WRAPPED[kind]}")
        if any(type(hook).__name__ == "WeightNorm" for hook in child._forward_pre_hooks.values()):
            raise ModelError(
                f"{where} has torch.nn.utils.weight_norm, with which it cannot be copied; use "
                "torch.nn.utils.parametrizations.weight_norm instead."
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name!r} is on the device 'meta' and has no data; build the model on a device that has them, such as "
                "device='cpu', or load its weights first."
            )
        if nn.parameter.is_lazy(tensor):
            continue
        if tensor.is_complex():
            raise ModelError(f"{name!r} has complex numbers; use two real parameters instead.")
        if isinstance(tensor, nn.Parameter) and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"Parameter {name!r} has values that are not finite; start from finite ones.")
    try:
        copy.deepcopy(module)
    except Exception as error:
        raise ModelError(
            f"The model cannot be copied ({first_line(error)}); each client needs a copy, so let no tensor be stored "
            "that was computed from parameters, and nothing that copy.deepcopy refuses."
        ) from error


_WRAPPED = {
    "ScriptModule": "whose parameters cannot be exchanged; give the module that it was made from.",
    "OptimizedModule": "made by torch.compile; give the module that it was made from.",
    "DataParallel": "which computes elsewhere; give its module, model.module.",
    "DistributedDataParallel": "which computes elsewhere; give its module, model.module.",
}


def with_shapes(module: nn.Module, sample: Tensor, seed: int) -> nn.Module:
    """Return the module, or if some of its parameters are lazy a copy with all of their shapes.

    Args:
        module: whose lazy parameters are made, with random starts by the ``seed``, as a batch passes through it.
        sample: a batch (B, ...) of the shape of the data.
        seed: of the random starts.

    Raises:
        ModelError: a module that fails on the batch, or that leaves a parameter without a shape.
    """
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if not lazy:
        return module
    module = copy.deepcopy(module)
    mode = module.training
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            module.eval()(torch.zeros_like(sample))
        except Exception as error:
            raise ModelError(
                f"The model has lazy parameters ({', '.join(lazy)}), and fails on a batch of shape "
                f"{tuple(sample.shape)}, which would give them their shapes: {first_line(error)}."
            ) from error
    left = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if left:
        raise ModelError(
            f"{left[0]!r} is lazy, and the forward pass does not give it a shape; use the layer in forward, or a layer "
            "with a shape."
        )
    return module.train(mode)


class _RefuseRandomness(TorchDispatchMode):
    """Raises on any operation that would draw from PyTorch's global generator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside; True would import all of torch._dynamo, seconds at the start of every run."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise ModelError(
                f"The forward pass calls {func.overloadpacket.__name__!r}, which draws from a global random generator; "
                "use nn.Dropout modules (they become keyed) instead of functional dropout or random operations; "
                "model.fix=true, in Python models.fix(model), replaces attention and recurrent layers with dropout."
            )
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention does so only where its ``dropout_p`` is above 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value) > 0)
    return True
