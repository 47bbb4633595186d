"""The private prior of networks: one release of a common covariance of the changes of layers.

Every client first trains its own copy of a public network by itself: w_i = w_0 + delta_i. A matrix
of its weights has a prior W_0 + Delta whose rows have a common covariance R on the columns of W (or
the other way round). One release of all clients estimates it, and each client minimizes

    l_i(w) + (1/2) (w - w_0)^T P_i (w - w_0),    P_i = ridge R_i^-1 in the columns of a matrix,
                                                 ridge times the identity elsewhere,

by the same local training as before, which is R = I: where nothing stands out of the noise, a
client keeps the model of its first training, to the bit. The release has one row for each client:
of every matrix D in delta_i / ||delta_i||

    M = D^T D - (tr D^T D) B / tr B,    what D has beyond the geometry of the client's records.

As for linear models (:mod:`.private_prior`), B = H (H + h I)^-1 is the part of a model that the
records determine when it is learned first. H is F / q: the second moment F of the gradients of
single records by the matrix at w_0, on that side, for each of its q rows, an empirical Fisher
information. h is the ridge and what an early end adds to it, which is 1 / (step size times steps)
for gradient descent (Ali, Kolter, Tibshirani 2019). With b = tr B / p, and e = tr D^T D, R_i = I +
p / (b e) mean(M). The server knows the law of the noise, and what it keeps of mean(M) is
:func:`~.private_prior.matrix_signal`.

    public = ...                                        # a network that public data, or a private run, have trained
    Trainer(algorithm=PriorLayers(layers=("fc",), local=LocalSGD(lr=0.1, epochs=5)), data=data, model=public,
            schedule=FullParticipation(), privacy=ClientPrivacy(clip_norm=1.0, epsilon=3.0), rounds=1).fit()

Parameters outside of ``layers`` are trained as well, by each client for itself, unless the
Trainer's ``trainable`` freezes them. Low-rank adapters are layers like all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from .._check import Positive
from ..algorithms.base import Problem, Public, Released, State
from ..algorithms.cohort import Cohort, Own, personal_fields
from ..algorithms.finetune import own_gradients
from ..algorithms.linear.solve import solve_regularized
from ..algorithms.store import Fields
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver, check_names
from ..local.precision import Part, Precision, PrecisionBlock
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.noise.symmetric import smat, svec
from .private_prior import FLOOR, LARGEST, LEAST_LENGTH, RELEASE, OneRelease, excess_of, matrix_signal

Side = Literal["auto", "input", "output"]
_BLOCK = 1 << 23
_ROUNDING = 16


@dataclass(frozen=True, kw_only=True)
class PriorLayers(OneRelease):
    """Layers of a network under a common prior, from one release of how clients change them.

    What a client hands to the release has a length of about 1 or less whatever it has learned, and
    is scaled by the clip norm, so that no bound on changes is needed.

    Args:
        layers: names of modules or parameters, such as ``("fc",)`` or ``("*.lora_B",)``; None: all
            that is trained.
        ridge: above 0, the pull (ridge / 2) ||w - w_0||^2 of local training.
        side: of the matrices, whose covariance is learned: ``"input"``, which inputs of a layer
            clients weigh differently; ``"output"``, in which of its outputs they differ;
            ``"auto"``: the shorter one. At most 512 rows, and none at all of a vector.
        scale: length of what a client hands to its release, before the clip, if all of its change
            were along one direction; most are shorter. ``"auto"``: twice the clip norm of the run.
        local: the clients' local solver, before and after the release; with ``proximal`` it takes
            the pull exactly, and any ``ridge`` is stable.

    Raises:
        ConfigError: a value outside these ranges, or a step size too large for 20 ridge without the
            proximal step.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, LocalSGD, PriorLayers, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=PriorLayers(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    layers: Sequence[str] | None = None
    ridge: Positive = 0.1
    side: Side = "input"
    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1, epochs=5))

    name = "prior_layers"
    title = "Private prior of layers"
    colour = "#e91e90"
    filled = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            check_names(self, "layers", self.layers)
        LocalSolver.check_given(self, self.local, self.ridge / FLOOR)

    # What it releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declare the one release: rows of M of every matrix, times ``scale``.

        Each M is symmetric, and stands in the row under an isometry (:func:`svec`), so that the
        squared length of a row is sum ||M||_F^2 <= sum (e^2 + e^2) <= 2 of all matrices, and less
        where the two moments overlap. The clip sees to it that the whole row is no longer than C,
        so that the sum moves by at most C in L2 norm where a client is added or removed, and by 2 C
        where one is replaced: one Gaussian release of all matrices. What a client does with the
        answer stays with it.
        """
        if problem.protects_records:
            raise ConfigError(
                "PriorLayers releases what whole clients have learned, and has no release for single records: use "
                "privacy=client."
            )
        self.check_one_round(problem, schedule)
        sizes = self._sizes(problem)
        if not sizes:
            raise ConfigError("PriorLayers.layers are vectors, which have no covariance; choose layers with matrices.")
        return (ReleasePlan(name=RELEASE, dimension=sum(sizes)),)

    def shared_parts(self, problem: Problem) -> tuple[Part, ...]:
        """Returns the tensors of the chosen layers, in the order of the flat parameters.

        Raises:
            ConfigError: a layer that the network does not have, or a covariance of more than 512
                rows.
        """
        layout = problem.layout
        chosen = torch.ones(layout.dimension, dtype=torch.bool)
        if self.layers is not None:
            chosen = layout.places(self.layers, "PriorLayers.layers")
        parts = []
        for name, shape, first in zip(layout.names, layout.shapes, layout.offsets, strict=False):
            if bool(chosen[first]):
                rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
                wanted = "input" if self.side == "input" or (self.side == "auto" and columns <= rows) else "output"
                if len(shape) < 2:
                    wanted = "input"  # of a vector: one column
                parts.append(Part(name, first, (rows, columns), wanted == "input"))
        large = [part for part in parts if part.width > LARGEST]
        if large:
            raise ConfigError(
                f"PriorLayers: the covariance of {large[0].name} on the {'in' if large[0].columns else 'out'}put side "
                f"has {large[0].width:,} rows, of at most {LARGEST}; choose other layers, or the other side."
            )
        return tuple(parts)

    def _sizes(self, problem: Problem) -> list[int]:
        """Returns the lengths of the parts of a row, one for the covariance of every matrix."""
        return [part.width * (part.width + 1) // 2 for part in self.matrices(problem)]

    def matrices(self, problem: Problem) -> list[Part]:
        """Returns the chosen parts with a covariance."""
        return [part for part in self.shared_parts(problem) if part.width > 1]

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts without a signal.

        Public, float64, of every matrix, by name: ``directions/`` (p, p), columns of length 1, and
        ``excess/`` (p,), what mean(M) has along them, of sum 0. Private: ``model`` (n, D) and
        ``determined`` (n, matrices), a client's b e.
        """
        matrices, public = self.matrices(problem), {}
        for part in matrices:
            public[f"directions/{part.name}"] = torch.eye(part.width, dtype=torch.float64)
            public[f"excess/{part.name}"] = torch.zeros(part.width, dtype=torch.float64)
        fields: Fields = {**personal_fields(problem), "determined": ((len(matrices),), torch.float64)}
        return State(public, problem.client_store(fields))

    def client(self, c: Cohort) -> tuple[dict[str, Tensor], Own]:
        own, rows = self._before(c)
        return {RELEASE: self.length * rows}, own

    def _before(self, c: Cohort) -> tuple[Own, Tensor]:
        """Returns what clients keep after the first training, and what they hand to the release, unscaled."""
        start = c.initial.expand(len(c.ids), -1)
        own = c.keep(self._train(c, self.ridge), start)
        largest = max(part.width**2 for part in self.matrices(c.problem))
        size = max(1, _BLOCK // max(c.problem.dimension, largest))
        pieces = [self._rows(c.problem, own["model"][at], c.ids[at]) for at in torch.arange(len(c.ids)).split(size)]
        rows, determined = (torch.cat(of) for of in zip(*pieces, strict=True))
        return {**own, "determined": determined.to(own["determined"])}, rows

    def _train(self, c: Cohort, lam: float | Precision) -> Tensor:
        """Returns the models (k, D) after local training from the public start, with a pull to it."""
        start = c.initial.expand(len(c.ids), -1)
        return c.train(self.local, start, lam=lam, anchor=start)

    def _rows(self, problem: Problem, models: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what clients with models (k, D) hand to the release, zero for a change that is
        within rounding, and b e of every matrix (k, matrices)."""
        parts, matrices = self.shared_parts(problem), self.matrices(problem)
        changes = (models - problem.initial).double().cpu()
        chosen = torch.cat([changes[:, part.places] for part in parts], dim=1)
        lengths = chosen.norm(dim=1)
        first = torch.cat([problem.initial[part.places] for part in parts])
        moved = lengths > max(_ROUNDING * torch.finfo(first.dtype).eps * float(first.norm()), LEAST_LENGTH)
        inverse = torch.where(moved, 1 / lengths.clamp_min(LEAST_LENGTH), 0.0)[:, None]
        pieces, determined = [], []
        for part, response in zip(matrices, self._responses(problem, matrices, clients), strict=True):
            change = part.matrix(inverse * changes)
            moment = torch.bmm(change.mT, change)
            energy, trace = _trace(moment), _trace(response)
            null = (energy / trace.clamp_min(LEAST_LENGTH))[:, None, None] * response
            beyond = torch.where((trace > 0)[:, None, None], moment - null, 0.0)  # no gradient carries no information
            pieces.append(svec(beyond))
            determined.append(energy * trace / part.width)
        return torch.cat(pieces, dim=1), torch.stack(determined, dim=1)

    def _responses(self, problem: Problem, matrices: list[Part], clients: Tensor) -> list[Tensor]:
        """Returns B of every matrix, (k, p, p) each: what the records of a client determine in local training."""
        moments = [torch.zeros(len(clients), part.width, part.width, dtype=torch.float64) for part in matrices]
        for place, gradients in own_gradients(problem, problem.initial, clients):
            for part, moment in zip(matrices, moments, strict=True):
                rows = part.matrix(gradients.double()).reshape(-1, part.width)
                moment[place] += (rows.mT @ rows).cpu()
        counts = problem.data.train.counts[clients]
        early = 1 / (self.local.lr * self.local.step_counts(counts).double())
        responses = []
        for part, moment in zip(matrices, moments, strict=True):
            others = part.shape[0] * part.shape[1] // part.width
            curvature = moment / (others * counts.double())[:, None, None]
            eye = torch.eye(part.width, dtype=torch.float64)
            response = solve_regularized(curvature + (self.ridge + early)[:, None, None] * eye, curvature)
            responses.append((response + response.mT) / 2)
        return responses

    def server(self, problem: Problem, public: Public, released: Released) -> dict[str, Tensor]:
        new, noise = dict(public), float(released.noise_std(RELEASE)) / self.length
        means = (released.values[RELEASE].cpu() / self.length).split(self._sizes(problem))
        for part, mean in zip(self.matrices(problem), means, strict=True):
            # a diagonal entry of the mean of m matrices D^T D / ||D||^2 of q rows has a variance of
            # 2 / (p^2 q m)
            rows = math.prod(part.shape) // part.width
            spread = math.hypot(noise, (2 / (rows * released.denominator)) ** 0.5 / part.width)
            new[f"excess/{part.name}"], new[f"directions/{part.name}"] = excess_of(matrix_signal(smat(mean), spread))
        return new

    def receive(self, c: Cohort) -> Own:
        # every client trains again under the prior, where something stands out of the noise
        return {**c.own, "model": self._again(c)}

    def _again(self, c: Cohort) -> Tensor:
        """Returns the models (k, D) under the prior; that of local training where there is no
        signal, or where training ends in numbers that are not finite."""
        matrices = self.matrices(c.problem)
        if not any(bool(c.public[f"excess/{part.name}"].any()) for part in matrices):
            return c.own["model"]
        models = self._train(c, self._precision(c.public, matrices, c.own))
        return torch.where(models.isfinite().all(dim=1)[:, None], models, c.own["model"])

    def _precision(self, public: Public, matrices: list[Part], own: Own) -> Precision:
        """Returns P of clients; it is the same everywhere but for their own b e."""
        blocks = []
        for at, part in enumerate(matrices):
            excess, like = public[f"excess/{part.name}"], own["model"]
            along = excess > excess.min()  # all the others are alike
            levels = torch.cat([excess[along], excess.min()[None]]).to(own["determined"].device)
            determined = own["determined"][:, at, None]
            variances = 1 + torch.where(determined > 0, part.width * levels / determined.clamp_min(LEAST_LENGTH), 0.0)
            strengths = (self.ridge / variances.clamp(FLOOR, part.width / FLOOR)).to(like)
            directions = public[f"directions/{part.name}"][:, along].to(like)
            blocks.append(PrecisionBlock(part, directions, strengths[:, :-1], strengths[:, -1]))
        return Precision(self.ridge, tuple(blocks))

    def personal(self, c: Cohort) -> Tensor:
        """Returns the clients' own models; a client that never took part trains twice, then under the prior."""
        return c.personal(lambda new: self._again(replace(new, own=self._before(new)[0])))

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns what was made of the release, see :meth:`init`: all of it is 0 where nothing
        stands out of the noise, but for the ``directions/``."""
        return {name: value.clone() for name, value in state.public.items()}


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
