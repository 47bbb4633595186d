"""Odd modules and losses, and a slow loop of plain PyTorch that trains them."""

import copy
import random
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fedmtl import FedAvg, FederatedDataset, FullParticipation, LocalSGD, Trainer
from fedmtl.privacy import ClientPrivacy, RecordPrivacy

WIDTH, HIDDEN, CLASSES = 5, 4, 3
CLIP, LR, ROUNDS, STEPS = 0.3, 0.5, 2, 2
GENERATOR = torch.Generator().manual_seed(0)
DATA = FederatedDataset.from_tensors(
    {
        f"c{i}": (torch.randn(6 + i, WIDTH, generator=GENERATOR), torch.arange(6 + i) % CLASSES)
        for i in range(3)
    },
    classes=CLASSES,
)
PRIVACY = {
    "none": None,
    "client": ClientPrivacy(clip_norm=CLIP, epsilon=float("inf")),
    "record": RecordPrivacy(clip_norm=CLIP, epsilon=float("inf")),
}


class Net(nn.Module):
    """Two layers with something between them, and around them a function (module, x) -> outputs."""

    def __init__(self, middle: nn.Module | None = None, forward: Callable | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.middle = middle or nn.Identity()
        self.last = nn.Linear(HIDDEN, CLASSES)
        self.function = forward

    def layers(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if self.function is None else self.function(self, x)


class OfFunction(nn.Module):
    """A layer that is a function of its input."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Recurrent(nn.Module):
    """The last output of a recurrent layer over the features."""

    def __init__(self, kind: type[nn.Module], **options) -> None:
        super().__init__()
        self.layer = kind(1, HIDDEN, batch_first=True, **options)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x[..., None])[0][:, -1])


class Halves(nn.Module):
    """Instance normalization of two halves of the features."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(len(x), 2, -1)).reshape(x.shape)


class Square(torch.autograd.Function):
    """x^2, without a rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class OptimizedModule(nn.Linear):
    """Has the name of what torch.compile returns, whose import takes seconds."""


class ExtraState(Net):
    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state) -> None: ...


def with_parameter(value: Tensor, forward: Callable, *, trains: bool = True) -> Net:
    net = Net(forward=forward)
    net.extra = nn.Parameter(value, requires_grad=trains)
    return net


def with_buffer(value: Tensor, forward: Callable) -> Net:
    net = Net(forward=forward)
    net.register_buffer("extra", value)
    return net


def changed(change: Callable) -> Net:
    """A network that a function changes in place."""
    net = Net()
    change(net)
    return net


def quietly(make: Callable) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def tied_layer() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def keeps_mean(net: Net, x: Tensor) -> Tensor:
    net.mean = 0.9 * getattr(net, "mean", 0.0) + 0.1 * net.first(x).detach().mean(0)
    return net.last(torch.tanh(net.first(x) - net.mean))


def counts(net: Net, x: Tensor) -> Tensor:
    net.extra += 1
    return net.layers(x)


def shrinks(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.first.weight.mul_(0.99)
    return net.layers(x)


def without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.layers(x)


def by_rows(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.layers(row) if row[0] > 0 else net.last(net.first(row)) for row in x])


def differentiated(net: Net, x: Tensor) -> Tensor:
    slopes = torch.func.vmap(torch.func.grad(lambda row: net.layers(row).sum()))(x)
    return net.layers(x) + 0.1 * slopes[:, :CLASSES]


def recomputed(net: Net, x: Tensor) -> Tensor:
    return net.last(checkpoint(lambda z: torch.tanh(net.first(z)), x, use_reentrant=False))


def hooked(net: Net) -> None:
    net.first.register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)


PARAMETRIZED = torch.nn.utils.parametrizations
TRAINS: dict[str, Callable[[], nn.Module]] = {
    "orthogonal": lambda: changed(lambda net: PARAMETRIZED.orthogonal(net.first)),
    "instance norm": lambda: Net(Halves()),
    "fx graph": lambda: torch.fx.symbolic_trace(
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES))
    ),
    "mixed dtypes": lambda: changed(lambda net: net.last.half()),
    "a number": lambda: with_parameter(torch.tensor(1.5), lambda net, x: net.extra * net.layers(x)),
    "no numbers": lambda: with_parameter(torch.zeros(0, 3), lambda net, x: net.layers(x)),
    "whole numbers": lambda: with_parameter(
        torch.tensor([1, 2, 3]), lambda net, x: net.layers(x) + net.extra, trains=False
    ),
    "some frozen": lambda: changed(lambda net: net.first.requires_grad_(False)),
    "unused": lambda: with_parameter(torch.ones(2), lambda net, x: net.layers(x)),
    "tied layer": tied_layer,
    "tied weight": lambda: Net(forward=lambda net, x: net.layers(net.first(x) @ net.first.weight)),
    "not contiguous": lambda: changed(
        lambda net: setattr(net.first, "weight", nn.Parameter(torch.randn(WIDTH, HIDDEN).T))
    ),
    "mask of bool": lambda: with_buffer(
        torch.tensor([True, False, True]), lambda net, x: torch.where(net.extra, net.layers(x), 0.0)
    ),
    "mask of infinity": lambda: with_buffer(
        torch.tensor([0.0, -torch.inf, 0.0, 0.0]),
        lambda net, x: net.last((net.first(x) + net.extra).softmax(1)),
    ),
    "custom function": lambda: Net(OfFunction(Square.apply)),
    "branches": lambda: Net(forward=by_rows),
    "item": lambda: Net(
        forward=lambda net, x: net.layers(x) * (1.0 + float(0.0 * x.detach().sum()))
    ),
    "numpy": lambda: Net(
        OfFunction(lambda x: x * float(torch.from_numpy(x.detach().numpy()).ndim))
    ),
    "gradient in forward": lambda: Net(forward=differentiated),
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "PReLU": lambda: Net(nn.PReLU()),
    "changes its input": lambda: Net(forward=lambda net, x: net.layers(x.add_(1.0))),
    "forward hook": lambda: changed(hooked),
    "extra state": ExtraState,
}
"""Modules that train as plain PyTorch trains them."""


def dropped(net: Net, x: Tensor) -> Tensor:
    return F.dropout(net.layers(x), 0.5, net.training)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], nn.Module] | None]] = {
    "BatchNorm": (
        lambda: Net(nn.BatchNorm1d(HIDDEN)),
        r"GroupNorm\(1, 4\)",
        lambda: Net(nn.GroupNorm(1, HIDDEN)),
    ),
    "SyncBatchNorm": (
        lambda: Net(nn.SyncBatchNorm(HIDDEN)),
        r"'middle' is SyncBatchNorm.*GroupNorm\(1, 4\)",
        lambda: Net(nn.GroupNorm(1, HIDDEN)),
    ),
    "lazy BatchNorm": (lambda: Net(nn.LazyBatchNorm1d()), r"LazyBatchNorm1d.*GroupNorm", None),
    "statistics of instances": (
        lambda: Net(Halves(track_running_stats=True)),
        r"Buffer 'middle\.norm\.running_mean' changes.*without running statistics",
        lambda: Net(Halves(track_running_stats=False)),
    ),
    "batch norm by a function": (
        lambda: Net(OfFunction(lambda x: F.batch_norm(x, None, None, training=True))),
        r"fails on a batch of shape \(1, 5\).*more than 1 value",
        None,
    ),
    "spectral norm": (
        lambda: changed(lambda net: PARAMETRIZED.spectral_norm(net.first)),
        r"Buffer 'first\.parametrizations\.weight\.0\._u' changes",
        None,
    ),
    "old weight norm": (
        lambda: quietly(lambda: changed(lambda net: torch.nn.utils.weight_norm(net.first))),
        r"'first' has torch\.nn\.utils\.weight_norm.*use torch\.nn\.utils\.parametrizations\.weight_norm",
        lambda: changed(lambda net: PARAMETRIZED.weight_norm(net.first)),
    ),
    "pruned": (
        lambda: changed(lambda net: prune.l1_unstructured(net.first, "weight", 0.5)),
        r"'first' is pruned.*prune\.remove",
        lambda: changed(
            lambda net: prune.remove(prune.l1_unstructured(net.first, "weight", 0.5), "weight")
        ),
    ),
    "quantized": (
        lambda: quietly(
            lambda: torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear}, dtype=torch.qint8)
        ),
        r"no parameter of real numbers.*quantized",
        Net,
    ),
    "no parameters": (
        lambda: OfFunction(lambda x: x[:, :CLASSES]),
        r"no parameter of real numbers",
        None,
    ),
    "all frozen": (
        lambda: changed(lambda net: net.requires_grad_(False)),
        r"no trainable parameter.*requires_grad_\(True\)",
        lambda: changed(lambda net: net.requires_grad_(False).requires_grad_(True)),
    ),
    "jit": (
        lambda: quietly(lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, CLASSES)))),
        r"'0' is of class RecursiveScriptModule.*give the module that it was made from",
        Net,
    ),
    "compiled": (
        lambda: OptimizedModule(WIDTH, CLASSES),
        r"OptimizedModule.*the module that it was made from",
        None,
    ),
    "DataParallel": (lambda: nn.DataParallel(Net()), r"DataParallel.*model\.module", None),
    "meta": (
        lambda: nn.Linear(WIDTH, CLASSES, device="meta"),
        r"'weight' is on the device 'meta'.*device='cpu'",
        lambda: nn.Linear(WIDTH, CLASSES, device="cpu"),
    ),
    "complex": (
        lambda: with_parameter(
            torch.ones(CLASSES, dtype=torch.complex64),
            lambda net, x: net.layers(x) * net.extra.abs(),
        ),
        r"'extra' has complex numbers.*two real",
        lambda: with_parameter(
            torch.ones(2, CLASSES), lambda net, x: net.layers(x) * net.extra.norm(dim=0)
        ),
    ),
    "sparse": (
        lambda: with_buffer(
            torch.eye(WIDTH).to_sparse(), lambda net, x: net.layers((net.extra @ x.T).T)
        ),
        r"'extra' has layout torch\.sparse_coo.*to_dense\(\)",
        lambda: with_buffer(torch.eye(WIDTH), lambda net, x: net.layers((net.extra @ x.T).T)),
    ),
    "not finite": (
        lambda: with_parameter(torch.full((2,), torch.nan), lambda net, x: net.layers(x)),
        r"'extra' has values that are not finite",
        None,
    ),
    "gradient hook": (
        lambda: changed(lambda net: net.first.weight.register_hook(lambda gradient: 2 * gradient)),
        r"'first\.weight' has a hook.*remove the hook",
        Net,
    ),
    "keeps a result": (
        lambda: changed(lambda net: setattr(net, "kept", net.first.weight * 2)),
        r"holds 'kept'.*set it to None",
        lambda: changed(lambda net: setattr(net, "kept", None)),
    ),
    "no copies": (
        lambda: changed(lambda net: setattr(net, "numbers", (i for i in ()))),
        r"cannot be copied",
        None,
    ),
    "unused lazy layer": (
        lambda: changed(lambda net: setattr(net, "extra", nn.LazyLinear(2))),
        r"'extra\.weight' is lazy",
        None,
    ),
    "lazy of another shape": (
        lambda: nn.Sequential(nn.LazyConv2d(2, 3)),
        r"lazy parameters \(0\.weight, 0\.bias\), and fails on a batch",
        None,
    ),
    "tuple": (lambda: Net(forward=lambda net, x: (net.layers(x), x)), r"it returned a tuple", None),
    "dictionary": (
        lambda: Net(forward=lambda net, x: {"logits": net.layers(x)}),
        r"it returned a dict",
        None,
    ),
    "two arguments": (
        lambda: Net(forward=lambda net, x, y: net.layers(x)),
        r"fails on a batch.*'y'",
        None,
    ),
    "no gradient": (lambda: Net(forward=without_gradient), r"have no gradient", None),
    "detached": (
        lambda: Net(forward=lambda net, x: net.layers(x).detach()),
        r"have no gradient.*detach",
        None,
    ),
    "whole outputs": (
        lambda: Net(forward=lambda net, x: net.layers(x).long()),
        r"dtype torch\.int64",
        None,
    ),
    "mean of the batch": (
        lambda: Net(OfFunction(lambda x: x - x.mean(0))),
        r"depend on the other examples.*LayerNorm",
        lambda: Net(nn.LayerNorm(HIDDEN)),
    ),
    "softmax of the batch": (
        lambda: Net(OfFunction(lambda x: x.softmax(0))),
        r"depend on the other examples",
        None,
    ),
    "sums of the batch": (
        lambda: Net(OfFunction(lambda x: x.cumsum(0))),
        r"depend on the other examples",
        None,
    ),
    "branch by the batch": (
        lambda: Net(forward=lambda net, x: net.layers(x) * (2.0 if x.sum() > 0 else 1.0)),
        r"depend on the other examples.*branch",
        None,
    ),
    "number of examples": (
        lambda: Net(OfFunction(lambda x: x * len(x))),
        r"or on their number",
        None,
    ),
    "fixed batch": (
        lambda: Net(forward=lambda net, x: net.layers(x.view(2, WIDTH))),
        r"fails on a batch of shape \(1, 5\).*any size",
        lambda: Net(forward=lambda net, x: net.layers(x.view(-1, WIDTH))),
    ),
    "squeezed": (
        lambda: Net(forward=lambda net, x: net.layers(x.squeeze())),
        r"must be the batch",
        None,
    ),
    "dropout by a function": (
        lambda: Net(forward=dropped),
        r"calls 'bernoulli_'.*nn\.Dropout modules",
        lambda: Net(nn.Dropout(0.0)),
    ),
    "random in evaluation": (
        lambda: Net(
            forward=lambda net, x: net.layers(x) + (0.0 if net.training else torch.rand(()))
        ),
        r"calls 'rand'",
        None,
    ),
    "random of Python": (
        lambda: Net(forward=lambda net, x: net.layers(x) + random.random()),
        r"other outputs for the same batch.*random",
        None,
    ),
    "keeps a mean": (
        lambda: Net(forward=keeps_mean),
        r"other outputs for the same batch.*keeps something",
        None,
    ),
    "counts": (lambda: with_buffer(torch.zeros(()), counts), r"Buffer 'extra' changes", None),
    "changes a parameter": (
        lambda: Net(forward=shrinks),
        r"Parameter 'first\.weight' changes",
        None,
    ),
    "checkpointed": (
        lambda: Net(forward=recomputed),
        r"do not follow.*torch\.utils\.checkpoint",
        None,
    ),
}
"""A module, what its refusal says, and the module that follows the advice, if that is another one."""


def vmap_refuses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none") * (
        1.0 + 0.0 * outputs.detach().max().item()
    )


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "mean": (lambda outputs, targets: F.cross_entropy(outputs, targets), r"reduction='none'"),
    "fails": (
        lambda outputs, targets: outputs.no_such_method(),
        r"loss fails on outputs of shape \(2, 3\)",
    ),
    "no gradient": (
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none").detach(),
        r"without a gradient",
    ),
    "errors": (
        lambda outputs, targets: (outputs.argmax(1) != targets).long(),
        r"dtype torch\.int64",
    ),
    "mixes": (
        lambda outputs, targets: F.cross_entropy(
            outputs - outputs.mean(0), targets, reduction="none"
        ),
        r"beside another one",
    ),
    "divides": (
        lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none") / len(targets),
        r"nor on their number",
    ),
    "random": (
        lambda outputs, targets: F.cross_entropy(
            outputs + torch.randn(3), targets, reduction="none"
        ),
        r"no random numbers",
    ),
}
"""A loss, and what its refusal says."""


def trainer(model, kind: str = "none", **settings) -> Trainer:
    """The trainer of two rounds of full-batch FedAvg without noise in double precision."""
    defaults = {
        "algorithm": FedAvg(local=LocalSGD(lr=LR, steps=STEPS, batch_size=None)),
        "data": DATA,
        "schedule": FullParticipation(),
        "privacy": PRIVACY[kind],
        "rounds": ROUNDS,
        "dtype": "float64",
        "finetune": None,
        "baselines": (),
        "progress": False,
    }
    return Trainer(model=model, **defaults | settings)


def by_hand(model: nn.Module, privacy: str) -> Tensor:
    """The outputs for all records after the same training, by loops over rounds, clients, steps and records."""
    model = copy.deepcopy(model).double().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    shared = [p.detach().clone() for p in trained]
    for _ in range(ROUNDS):
        changes = []
        for client in DATA.ids:
            own = [p.clone() for p in shared]
            records = DATA.subset([client]).train
            for _ in range(STEPS):
                _set(trained, own)
                gradient = _gradient(model, trained, records.x.double(), records.y, privacy)
                own = [p - LR * g for p, g in zip(own, gradient, strict=True)]
            change = [p - q for p, q in zip(own, shared, strict=True)]
            changes.append(_clipped(change) if privacy == "client" else change)
        means = [torch.stack(each).mean(0) for each in zip(*changes, strict=True)]
        shared = [p + mean for p, mean in zip(shared, means, strict=True)]
    _set(trained, shared)
    return model.eval()(DATA.train.x.double())


def _gradient(
    model: nn.Module, trained: list[nn.Parameter], x: Tensor, y: Tensor, privacy: str
) -> list[Tensor]:
    if privacy != "record":
        loss = F.cross_entropy(model(x.clone()), y)
        return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
    clipped = [
        _clipped(_gradient(model, trained, x[i : i + 1], y[i : i + 1], "none"))
        for i in range(len(y))
    ]
    return [torch.stack(each).mean(0) for each in zip(*clipped, strict=True)]


def _clipped(parts: list[Tensor]) -> list[Tensor]:
    norm = float(torch.cat([part.flatten() for part in parts]).norm())
    return [part * min(1.0, CLIP / max(norm, 1e-12)) for part in parts]


def _set(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
