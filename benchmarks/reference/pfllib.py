"""Five methods without noise beside PFLlib's own code, on equal batches.

    python -m benchmarks.reference.pfllib --pfllib PATH

PATH is a checkout of https://github.com/TsingZ0/PFLlib, whose clients and servers are imported and
run as they are; what they read from files is given them from memory. Both sides train 100 writers of
the digits from one start, everybody in each round and all ten images of a writer in each step, so
that there is nothing random left, and all writers weigh the same. What is printed is the mean test
accuracy on each side, and the largest difference of any parameter of any writer's model.

Of FedAvg and pFedMe the shared models are compared. PFLlib has no personal models of pFedMe to
compare: its ``personalized_params`` are the parameters of the model that it overwrites by the shared
one. Its APFL is another method: the personal part follows its own loss in place of the mixture's, the
mixing weight adapts, and after a local run the mixture replaces the personal part.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl import (
    APFL,
    Ditto,
    FedAvg,
    FederatedDataset,
    FedRep,
    FullParticipation,
    LocalSGD,
    PFedMe,
    Trainer,
    load_data,
)

from .measure import commit
from .records import number

CLIENTS = 100
ROUNDS = 20
LR = 0.1
EPOCHS = 3
FILE = Path(__file__).parent / "pfllib.csv"
COLUMNS = ("method", "fedmtl", "pfllib", "difference", "commit", "pfllib_commit")
SOLVER = LocalSGD(lr=LR, epochs=EPOCHS, batch_size=None)


class Network(nn.Module):
    """A network of one hidden layer, in the two parts that PFLlib asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs (N, 10) of images (N, 1, 8, 8)."""
        outputs: Tensor = self.head(self.base(x))
        return outputs


@dataclass(frozen=True)
class Method:
    """A method on both sides.

    Attributes:
        ours: with its settings.
        module, server: of PFLlib.
        theirs: settings of PFLlib beside the common ones.
        models: of PFLlib's server after training, one for each client.
        personal: False compares the shared model.
    """

    ours: Any
    module: str
    server: str
    theirs: dict[str, Any]
    models: Callable[[Any], list[nn.Module]]
    personal: bool = True


def _shared(server: Any) -> list[nn.Module]:
    return [server.global_model] * len(server.clients)


def _received(server: Any) -> list[nn.Module]:
    """Returns the clients' models after they have received the last representation."""
    server.send_models()
    return [client.model for client in server.clients]


def _own(server: Any) -> list[nn.Module]:
    return [client.model_per for client in server.clients]


METHODS = {
    "FedAvg": Method(FedAvg(local=SOLVER), "serveravg", "FedAvg", {}, _shared, personal=False),
    "Ditto": Method(Ditto(lam=0.5, local=SOLVER), "serverditto", "Ditto", {"mu": 0.5}, _own),
    "FedRep": Method(FedRep(local=SOLVER, head=("head",)), "serverrep", "FedRep", {}, _received),
    "APFL": Method(APFL(alpha=0.5, local=SOLVER), "serverapfl", "APFL", {"alpha": 0.5}, _own),
    "pFedMe": Method(
        PFedMe(lam=1.0, eta=0.5, local_rounds=EPOCHS, local=LocalSGD(lr=LR, epochs=5, batch_size=None)),
        "serverpFedMe",
        "pFedMe",
        # its step of the client's copy is lamda times the local learning rate
        {"lamda": 1.0, "local_learning_rate": 0.5, "K": 5, "p_learning_rate": LR, "beta": 1.0},
        _shared,
        personal=False,
    ),
}  # fmt: skip


def rows_of(data: FederatedDataset, train: bool) -> list[tuple[Tensor, Tensor]]:
    """Returns the images and labels of every client."""
    side = data.test
    if train:
        side = data.train
    x = data.transform(side.x, torch.float64)
    counts = side.counts.tolist()
    return list(zip(x.split(counts), side.y.split(counts), strict=True))


def accuracy(models: Sequence[nn.Module], data: FederatedDataset) -> float:
    """Returns the mean over clients of the accuracy on test images."""
    shares = [
        float((model(x).argmax(1) == y).float().mean())
        for model, (x, y) in zip(models, rows_of(data, False), strict=True)
    ]
    return sum(shares) / len(shares)


def flat(model: nn.Module) -> Tensor:
    """Returns the parameters of a model as one vector (D,)."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def theirs(method: Method, data: FederatedDataset, start: nn.Module) -> list[nn.Module]:
    """Returns the models of PFLlib's server after its own training."""
    train, test = rows_of(data, True), rows_of(data, False)

    def read(dataset: str, client: int, is_train: bool = True, few_shot: int = 0) -> Any:
        side = test
        if is_train:
            side = train
        return list(zip(*side[client], strict=True))

    server_module = import_module(f"flcore.servers.{method.module}")
    for name in ("flcore.clients.clientbase", "flcore.servers.serverbase"):
        import_module(name).read_client_data = read  # type: ignore[attr-defined]
    settings = {
        "model": copy.deepcopy(start), "algorithm": method.server, "dataset": "digits",
        "device": "cpu", "save_folder_name": "", "num_classes": 10, "batch_size": 10,
        "local_learning_rate": LR, "local_epochs": EPOCHS, "plocal_epochs": EPOCHS, "few_shot": 0,
        "learning_rate_decay": False, "learning_rate_decay_gamma": 1.0,
        "global_rounds": ROUNDS - 1, "num_clients": len(data), "join_ratio": 1.0,
        "random_join_ratio": False, "time_select": False, "goal": "", "time_threthold": 1e9,
        "top_cnt": 100, "auto_break": False, "eval_gap": 10**6, "client_drop_rate": 0.0,
        "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 1,
        "batch_num_per_client": 1, "num_new_clients": 0, "fine_tuning_epoch_new": 0,
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = getattr(server_module, method.server)(
            argparse.Namespace(**settings | method.theirs), 0
        )
        for client in server.clients:
            for group in client.optimizer.param_groups:
                # pFedMe's optimizer adds a weight decay that the method does not have.
                group["mu"] = 0.0
        # its files are not wanted
        server.save_results = server.save_global_model = lambda: None
        server.train()
    return method.models(server)


def compared(method: Method, data: FederatedDataset) -> tuple[float, float, float]:
    """Returns both accuracies, and the largest difference of a parameter."""
    # Rounding alone could turn a unit of the hidden layer on or off, so both sides compute in double.
    torch.manual_seed(0)
    start = Network().double()
    result = Trainer(
        algorithm=method.ours,
        data=data,
        model=copy.deepcopy(start),
        schedule=FullParticipation(),
        privacy=None,
        rounds=ROUNDS,
        eval_every=ROUNDS,
        dtype="float64",
        progress=False,
    ).fit()
    models = theirs(method, data, start)
    other = torch.stack([flat(model) for model in models])
    own = result.personal
    if not method.personal:
        own = flat(result.shared_model()).expand_as(other)
    ours = []
    for vector in own:
        model = copy.deepcopy(start)
        nn.utils.vector_to_parameters(vector.double(), model.parameters())
        ours.append(model)
    return accuracy(ours, data), accuracy(models, data), float((own - other).abs().max())


def main() -> None:
    """Runs every method on both sides and writes the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pfllib", type=Path, required=True, help="folder of its checkout")
    parser.add_argument("--pfllib-commit", default="", help="if that folder has no .git")
    given = parser.parse_args()
    system = given.pfllib / "system"
    if not (system / "flcore").is_dir():
        parser.error(f"{given.pfllib} has no system/flcore; give a checkout of PFLlib")
    sys.path.insert(0, str(system.resolve()))
    theirs_at = given.pfllib_commit
    if not theirs_at:
        words = ["git", "-C", str(given.pfllib), "rev-parse", "--short=12", "HEAD"]
        theirs_at = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    data = load_data("digits", clients=CLIENTS, seed=0)
    lines = [",".join(COLUMNS)]
    for name, method in METHODS.items():
        own, other, difference = compared(method, data)
        cells = [name, number(own), number(other), number(difference, 2), commit(), theirs_at]
        lines.append(",".join(cells))
        print(lines[-1], flush=True)
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
