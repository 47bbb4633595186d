"""Networks by name: those of the papers, torchvision's, models of tokens and of several inputs;
low-rank adapters.

A factory takes the shape of the data and returns a module, so that a model can be named before the
data are read.
"""

from .fix import fix
from .images import celeba_cnn, fedrep_cnn, femnist_cnn, torchvision_model, with_group_norm
from .inputs import BoundedInputs, BoundedOutputs, NamedInputs
from .low_rank import lora, merge_lora
from .networks import (
    MeanEmbedding,
    ModelFactory,
    linear_regression,
    logistic_regression,
    mean_embedding,
    mlp,
    softmax_regression,
)

__all__ = [
    "BoundedInputs",
    "BoundedOutputs",
    "MeanEmbedding",
    "ModelFactory",
    "NamedInputs",
    "celeba_cnn",
    "fedrep_cnn",
    "femnist_cnn",
    "fix",
    "linear_regression",
    "logistic_regression",
    "lora",
    "mean_embedding",
    "merge_lora",
    "mlp",
    "softmax_regression",
    "torchvision_model",
    "with_group_norm",
]
