"""Packages of the extras, which the core works without: each is imported when it is first used.

A module takes them from here, such as ``from .._extras import pandas as pd``. If one is not
installed, its first use is one sentence with the line for pip.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import MissingExtra

# by the name that is imported: the extra, and the feature that needs it
_NEEDED = {
    "hydra": ("cli", "The command needs"),
    "omegaconf": ("cli", "The command needs"),
    "yaml": ("cli", "The settings of a run in YAML need"),
    "rich": ("cli", "The progress bar needs"),
    "threadpoolctl": ("cli", "One thread for products of NumPy needs"),
    "pandas": ("data", "Tables and data frames need"),
    "pyarrow": ("data", "Files of parquet need"),
    "PIL": ("data", "Image files need"),
    "sklearn": ("data", "A graph of nearest neighbours needs"),
    "torchvision": ("models", "Networks and checksums of torchvision need"),
    "opacus": ("models", "models.fix of a recurrent or an attention layer needs"),
    "matplotlib": ("report", "Figures need"),
    "jinja2": ("report", "The page of a report needs"),
    "h5py": ("h5", "Files of HDF5 need"),
    "tensorboard": ("tensorboard", "logger=tensorboard needs"),
    "mlflow": ("mlflow", "logger=mlflow needs"),
    "onnx": ("export", "Programs in ONNX, unlike those in .pt2, need"),
    "onnxruntime": ("export", "Programs in ONNX, unlike those in .pt2, need"),
    "onnxscript": ("export", "Programs in ONNX, unlike those in .pt2, need"),
    "flwr": ("flower", "fedmtl.flower needs"),
    "cryptography": ("secure", "Secure aggregation needs"),
}


@contextmanager
def extras() -> Iterator[None]:
    """Imports packages of extras in the block, which may be a module that cannot do without them.

    Raises:
        MissingExtra: one is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # A package that is installed and broken is no missing one.
        if package not in _NEEDED:
            raise
        extra, needs = _NEEDED[package]
        raise MissingExtra(
            f'{needs} the package {package}, which is not installed: pip install "fedmtl[{extra}]".'
        ) from error


def installed(package: str) -> bool:
    """Returns True if a package can be imported, for a caller that has another way without it."""
    # The parent of a submodule is imported, and may be missing itself.
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


class _Later:
    """A module that is imported with its first attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools that look at all names of a module import nothing
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self) -> ModuleType:
        with extras():
            return import_module(self._name)


def load(package: Any) -> ModuleType:
    """Returns a package of this module, imported.

    Raises:
        MissingExtra: it is not installed.
    """
    module: ModuleType = package._load()
    return module


# Type checkers read the packages themselves, with their types.
if TYPE_CHECKING:
    import h5py as h5py
    import jinja2 as jinja2
    import matplotlib.ticker as ticker
    import mlflow as mlflow
    import onnx as onnx
    import onnxruntime as onnxruntime
    import onnxscript as onnxscript
    import pandas as pandas
    import pyarrow.parquet as parquet
    import sklearn.neighbors as neighbors
    import threadpoolctl as threadpoolctl
    import torch.utils.tensorboard as tensorboard
    import torchvision.datasets as vision_data
    import torchvision.models as vision_models
    from PIL import Image as Image
    from PIL import ImageOps as ImageOps
    from rich import console as console
    from rich import progress as progress
else:
    h5py = _Later("h5py")
    jinja2 = _Later("jinja2")
    mlflow = _Later("mlflow")
    onnx = _Later("onnx")
    onnxruntime = _Later("onnxruntime")
    onnxscript = _Later("onnxscript")
    pandas = _Later("pandas")
    parquet = _Later("pyarrow.parquet")
    neighbors = _Later("sklearn.neighbors")
    threadpoolctl = _Later("threadpoolctl")
    ticker = _Later("matplotlib.ticker")
    tensorboard = _Later("torch.utils.tensorboard")
    vision_data = _Later("torchvision.datasets")
    vision_models = _Later("torchvision.models")
    Image = _Later("PIL.Image")
    ImageOps = _Later("PIL.ImageOps")
    console = _Later("rich.console")
    progress = _Later("rich.progress")
