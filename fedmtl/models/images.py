"""Convolutional networks: those of the papers, and torchvision's by name."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._check import Count, check_arguments
from .._extras import load, vision_models
from ..data.examples import DataSpec
from ..errors import ConfigError, ModelError
from .networks import factory


@factory
def femnist_cnn(spec: DataSpec) -> nn.Module:
    """Returns the FEMNIST network of Hu et al. 2023: conv5x5-32, pool, conv5x5-64, pool, linear.

    115,646 parameters on 1 x 28 x 28 images with 62 classes: unpadded convolutions leave 64 x 4 x 4
    features.

    Args:
        spec: the shape of the data.

    Example:
        >>> from fedmtl import models
        >>> from fedmtl.data import DataSpec
        >>> network = models.femnist_cnn()(DataSpec(shape=(1, 28, 28), classes=62, clients=206))
        >>> sum(parameter.numel() for parameter in network.parameters())
        115646
    """
    layers, features = _two_convolutions(spec, "femnist_cnn", 32)
    return nn.Sequential(*layers, nn.Linear(features, spec.outputs))


@factory
def celeba_cnn(
    spec: DataSpec,
    *,
    norm: Literal["group", "none"] = "group",
    channels: Count = 32,
    groups: Count = 8,
) -> nn.Module:
    """Returns the CelebA network of LEAF and of Hu et al. 2023.

    It is four times conv3x3-32, norm, pool; then linear.

    30,498 parameters on 3 x 84 x 84 images with 2 classes: padded convolutions leave 32 x 5 x 5
    features. The papers normalize by batch, whose statistics would leave the clients without noise;
    here it is by groups of channels.

    Args:
        spec: the shape of the data.
        norm: ``"group"``, or ``"none"``.
        channels: of every convolution.
        groups: of the normalization, at most; their number divides the channels.

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import celeba_cnn
        >>> module = celeba_cnn()(DataSpec(shape=(3, 84, 84), classes=2, clients=100))
        >>> sum(p.numel() for p in module.parameters())
        30498
    """
    # Four pools halve each side four times.
    incoming, height, width = _image(spec, "celeba_cnn", 16)
    blocks: list[nn.Module] = []
    for _ in range(4):
        blocks.append(nn.Conv2d(incoming, channels, 3, padding=1))
        if norm == "group":
            blocks.append(_group_norm(channels, groups))
        blocks += [nn.MaxPool2d(2), nn.ReLU()]
        incoming = channels
    return nn.Sequential(
        *blocks, nn.Flatten(), nn.Linear(channels * (height // 16) * (width // 16), spec.outputs)
    )


@factory
def fedrep_cnn(spec: DataSpec) -> nn.Module:
    """Returns the CIFAR network of FedRep (Collins et al., ICML 2021).

    It is conv5x5-64, pool, conv5x5-64, pool, linear 120, linear 64, linear.

    That of CENTAUR (Shen et al., "Share your representation only", 2023) is wider: 384 and 192
    units in the code of its table, 384 and 32 in a later one.

    307,842 parameters on 3 x 32 x 32 images with 10 classes; all but the last layer (650) are the
    representation.

    Args:
        spec: the shape of the data.

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import fedrep_cnn
        >>> module = fedrep_cnn()(DataSpec(shape=(3, 32, 32), classes=10, clients=100))
        >>> sum(p.numel() for p in module.parameters())
        307842
    """
    layers, features = _two_convolutions(spec, "fedrep_cnn", 64)
    layers += [nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, spec.outputs))


@factory
def torchvision_model(
    spec: DataSpec,
    name: str = "resnet18",
    *,
    norm: Literal["group", "keep"] = "group",
    groups: Count = 32,
    weights: str | None = None,
    **options: Any,
) -> nn.Module:
    """Returns a classification network of torchvision, by its name.

    The last layer has the outputs of the data. Images with another number of channels than 3 get a
    first convolution of theirs, with new weights.

    Args:
        spec: the shape of the data.
        name: as in ``torchvision.models.list_models()``, such as ``"resnet18"``.
        norm: ``"group"`` puts group normalization in the place of batch normalization, with its
            scale and shift; ``"keep"`` changes nothing, and a network with batch normalization is
            refused when it is trained.
        groups: of the group normalization, at most; their number divides the channels of a layer.
        weights: pretrained weights by torchvision's name, such as ``"DEFAULT"``, downloaded if
            they are not cached; None for random ones. The statistics of batch normalization are
            lost with it.
        options: further arguments of the network.

    Raises:
        ConfigError: an unknown name or option, when the network is built.
        ModelError: data that are no images.

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import torchvision_model
        >>> spec = DataSpec(shape=(3, 64, 64), classes=5, clients=100)
        >>> torchvision_model("squeezenet1_1")(spec).num_classes
        5
    """
    # Data that are no images are refused before the library is imported.
    channels, _, _ = _image(spec, "torchvision_model", 1)

    accepted = vision_models.list_models(module=load(vision_models))
    if name not in accepted:
        raise ConfigError(f"torchvision_model.name is {name!r}; accepted: {', '.join(accepted)}.")
    try:
        start: dict[str, Any] = {"num_classes": spec.outputs}
        # pretrained ones have the classes of other images; the last layer is replaced
        if weights is not None:
            start = {"weights": weights}
        module: nn.Module = vision_models.get_model(name, **start, **options)
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(
            f"torchvision_model: {name!r} with weights={weights!r} cannot be made: {error}."
        ) from error
    if weights is not None:
        _replace_last(module, spec.outputs, name)
    if channels != 3:
        _replace_first(module, channels, name)
    if norm == "keep":
        return module
    return with_group_norm(module, groups)


@check_arguments
def with_group_norm(module: nn.Module, groups: Count = 32) -> nn.Module:
    """Replaces every batch normalization by group normalization, in place.

    Scales and shifts are kept; running statistics are dropped (Wu and He, "Group normalization",
    ECCV 2018).

    Args:
        module: any module.
        groups: at most; the largest number of at most ``groups`` that divides the channels of a
            layer is taken. A layer that may have vectors (``nn.BatchNorm1d``, ``nn.SyncBatchNorm``)
            has one group, since a group with a single number would be constant.

    Returns:
        The module.

    Example:
        >>> from torch import nn
        >>> from fedmtl.models import with_group_norm
        >>> module = with_group_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), groups=4)
        >>> module[1].num_groups
        4
    """
    for name, child in list(module.named_children()):
        if isinstance(child, _BatchNorm):
            most = 1
            if isinstance(child, (nn.BatchNorm2d, nn.BatchNorm3d)):
                most = groups
            layer = _group_norm(child.num_features, most, eps=child.eps, affine=child.affine)
            if child.affine:
                layer.load_state_dict(
                    {"weight": child.weight.detach(), "bias": child.bias.detach()}
                )
            setattr(module, name, layer)
        else:
            with_group_norm(child, groups)
    return module


def _group_norm(
    channels: int, groups: int, *, eps: float = 1e-5, affine: bool = True
) -> nn.GroupNorm:
    chosen = next(n for n in range(min(groups, channels), 0, -1) if channels % n == 0)
    return nn.GroupNorm(chosen, channels, eps=eps, affine=affine)


def _replace_first(module: nn.Module, channels: int, name: str) -> None:
    """Makes the first convolution one of ``channels`` inputs, in place, with new weights."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            # The pretrained filters of three colours do not fit, so they are drawn anew.
            child.in_channels = channels
            child.weight = nn.Parameter(
                child.weight.new_empty(child.out_channels, channels, *child.kernel_size)
            )
            child.reset_parameters()
            return
    raise ModelError(
        f"torchvision_model: {name!r} has no convolution that could take {channels} channels."
    )


def _replace_last(module: nn.Module, outputs: int, name: str) -> None:
    """Makes the last linear layer one of ``outputs`` outputs, in place, with new weights."""
    layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if not layers:
        raise ModelError(
            f"torchvision_model: {name!r} has no linear layer for {outputs} outputs; "
            "use weights=null."
        )
    last = layers[-1]
    last.out_features = outputs
    last.weight = nn.Parameter(last.weight.new_empty(outputs, last.in_features))
    if last.bias is not None:
        last.bias = nn.Parameter(last.weight.new_empty(outputs))
    last.reset_parameters()


def _two_convolutions(spec: DataSpec, name: str, first: int) -> tuple[list[nn.Module], int]:
    """Returns conv5x5-``first``, pool, conv5x5-64, pool, flatten, without padding, and the number
    of features."""
    channels, height, width = _image(spec, name, 16)
    side = [((n - 4) // 2 - 4) // 2 for n in (height, width)]
    layers = [nn.Conv2d(channels, first, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return layers, 64 * side[0] * side[1]


def _image(spec: DataSpec, model: str, least: int) -> tuple[int, int, int]:
    """Channels, height and width of the data.

    Raises:
        ModelError: no images, or smaller ones.
    """
    if len(spec.shape) != 3 or min(spec.shape[1:]) < least:
        pixels = ""
        if least > 1:
            pixels = f" of {least} pixels or more"
        raise ModelError(
            f"{model} needs images (channels, height, width){pixels}, not {spec.shape}."
        )
    return spec.shape[0], spec.shape[1], spec.shape[2]
