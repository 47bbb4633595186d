"""What files may name: settings, readers, networks and loggers of the package, modules of torch.nn, trusted modules."""

import json
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from fedmtl import FedAvg, Result
from fedmtl.cli.names import config_folder
from fedmtl.errors import ConfigError
from fedmtl.trainer.run_fingerprint import describe
from fedmtl.trainer.targets import resolved_target

from .settings import DATA, SOLVER, trainer

OWN = """
from dataclasses import dataclass
from os import system
from pathlib import Path

from fedmtl import FedAvg

Path(__file__).with_name("imported").touch()

@dataclass(frozen=True)
class Mine(FedAvg):
    strength: float = 1.0

def network(width: int):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(width))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's own, and beside it the mark of its import."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "my_method.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    return folder


REFUSED = """
os.system pathlib.Path.touch pathlib.Path builtins.exec eval functools.partial hydra.utils.get_method
my_method.Mine fedmtl.cli.main.os.system fedmtl.cli.main.main fedmtl.cli.main fedmtl.trainer.folder.Path
fedmtl.trainer.folder.Path.touch fedmtl.trainer.callbacks.Path fedmtl.import_module fedmtl.Result.load
fedmtl.Trainer fedmtl.personalize fedmtl.report.report fedmtl.trainer.tensor_files.write_tensors
fedmtl._files.write_bytes fedmtl.trainer.callbacks.write_bytes fedmtl.privacy.Ledger
fedmtl.privacy.open_channel fedmtl.algorithms.ClientStore fedmtl.local.Executor fedmtl.data.LOADERS
fedmtl.data.reader fedmtl.models.networks.wraps fedmtl.__main__.main fedmtl.FedAvg.__init__
fedmtl.algorithms.FedAvg.client_update torch.load torch.hub.load torch.utils.cpp_extension.load
torch.nn.modules.module.torch.load torch.nn.functional.torch.load torch.nn.parallel.DistributedDataParallel
torch.nn.DataParallel torch.nn.Module.apply torch.nn.Parameter torch.nn.init torch.jit.load
torch.package.PackageImporter torch.optim.SGD
"""  # reached by their own names, through this package, and through torch


def test_a_file_may_not_name_what_could_run_code(own: Path) -> None:
    for target in ("", *REFUSED.split()):
        with pytest.raises(ConfigError, match=r"which (a file may not name|cannot be imported)"):
            resolved_target(target)
    assert not (own / "imported").exists()


def test_a_file_may_name_what_the_packaged_configurations_do() -> None:
    files = sorted(config_folder().rglob("*.yaml"))
    found = {
        target for file in files for target in re.findall(r"_target_: ([\w.]+)", file.read_text())
    }
    found -= {
        "fedmtl.Trainer",
        "null",
    }  # config.yaml itself, whose arguments are all settings; a choice of none
    assert len(found) > 50
    for target in found | {
        "fedmtl.ServerOptimizer",
        "fedmtl.schedules.Dropouts",
        "fedmtl.models.lora",
    }:
        assert callable(
            resolved_target(target, logger=target.startswith("fedmtl.trainer.callbacks."))
        )
    assert resolved_target("torch.nn.CrossEntropyLoss") is nn.CrossEntropyLoss
    assert resolved_target("torch.nn.Linear") is nn.Linear


def test_a_trusted_module_is_named_and_nothing_that_it_imports(own: Path) -> None:
    made = resolved_target("my_method.Mine", ["my_method"])
    assert isinstance(made(local=SOLVER), FedAvg)
    assert resolved_target("my_method.network", ["my_method"])(3)[1].out_features == 3
    for name in ("system", "Path", "dataclass"):
        with pytest.raises(ConfigError, match="which a file may not name"):
            resolved_target(f"my_method.{name}", ["my_method"])
    with pytest.raises(
        ConfigError, match=r"say so: --trust my_method, in Python trust=\['my_method'\]"
    ):
        resolved_target("my_method.Mine", ["my_metho", "my_method.Mine"])


# The folder of a run


def test_a_loaded_folder_runs_nothing(own: Path, tmp_path: Path) -> None:
    trainer(folder=tmp_path / "run", rounds=1).fit()
    path = tmp_path / "run/private/outcome.json"
    found = json.loads(path.read_text())
    planted = {"class": "my_method.Mine", "local": None}
    path.write_text(json.dumps(found | {"adaptation": found["adaptation"] | {"finetune": planted}}))
    assert Result.load(tmp_path / "run").adaptation is None
    path.write_text(json.dumps(found | {"finetuned": {"settings": planted}}))
    with pytest.raises(
        ConfigError, match=r"'my_method.Mine' is no class of fedmtl.algorithms, fedmtl.contrib, "
    ):
        Result.load(tmp_path / "run")
    for name in ("networks", "networks.wraps", "my_method.Mine"):
        path.write_text(
            json.dumps(found | {"network": found["network"] | {"made": {"class": name}}})
        )
        assert Result.load(tmp_path / "run").module is None
    assert not (own / "imported").exists()


def test_an_algorithm_of_the_users_own_is_loaded_where_it_is_trusted(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = resolved_target("my_method.Mine", ["my_method"])(local=SOLVER, strength=2.0)
    result = trainer(algorithm=mine, folder=tmp_path / "run", rounds=2).fit()
    (own / "imported").unlink()
    monkeypatch.delitem(sys.modules, "my_method")
    assert Result.load(tmp_path / "run").adapt(DATA).summary() == result.adapt(DATA).summary()
    path = tmp_path / "run/private/outcome.json"
    found = json.loads(path.read_text())
    path.write_text(
        json.dumps(found | {"adaptation": found["adaptation"] | {"finetune": describe(mine)}})
    )
    assert Result.load(tmp_path / "run").adaptation is None
    assert not (own / "imported").exists()
    with pytest.raises(
        ConfigError, match=r"are your own; .* Result.load\(folder, trust=\[MODULE\]\)"
    ):
        Result.load(tmp_path / "run").adapt(DATA)
    again = Result.load(tmp_path / "run", trust=["my_method"])
    assert (own / "imported").exists()
    assert again.adaptation is not None
    assert repr(again.adaptation["finetune"]) == repr(mine)
    with pytest.raises(ConfigError, match=r"trust is 'my_method'; give a list"):
        Result.load(tmp_path / "run", trust="my_method")
