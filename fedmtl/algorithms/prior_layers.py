"""The private prior of networks: one release says what changes of layers have in common, and each client trains again.

Every client first trains its own copy of a public network by itself: w_i = w_0 + delta_i. A matrix of its weights has a
prior W_0 + Delta whose rows have a common covariance R on the columns of W (or the other way round), and a mean. One
release of all clients estimates both, and each client minimizes

    l_i(w) + (1/2) (w - w_0 - s_i m)^T P_i (w - w_0 - s_i m),    P_i = ridge R_i^-1 in the columns of a matrix,
                                                                 ridge times the identity elsewhere,

by the same local training as before, which is R = I and m = 0: where nothing stands out of the noise, a client keeps
the model of its first training, to the bit. The release has one row for each client, of

    sqrt(share) u_i,    u_i = delta_i / ||delta_i||,           its direction, and of every matrix D in u_i
    sqrt(1 - share) M,  M = D^T D - (tr D^T D) B / tr B,       what D has beyond the geometry of the client's records.

As for linear models (:mod:`.private_prior`), B = H (H + h I)^-1 is the part of a model that the records determine when
it is learned first. H is F / q: the second moment F of the gradients of single records by the matrix at w_0, on that
side, for each of its q rows, an empirical Fisher information. h is the ridge and what an early end adds to it, which is
1 / (step size times steps) for gradient descent (Ali, Kolter, Tibshirani 2019). With b = tr B / p, and e = tr D^T D,
R_i = I + p / (b e) mean(M). The server knows the law of the noise. What it keeps of mean(M) is
:func:`~.private_prior.matrix_signal`; of the mean direction it keeps, matrix by matrix, the singular values that stand
out, shrunk for the least squared error (:func:`shrunk_matrix`). s_i is ||delta_i||, which stays with the client.

    public = ...                                        # a network that public data, or a private run, have trained
    Trainer(algorithm=PriorLayers(layers=("fc",), local=LocalSGD(lr=0.1, epochs=5)), data=data, model=public,
            schedule=FullParticipation(), privacy=ClientPrivacy(clip_norm=1.0, epsilon=3.0), rounds=1).fit()

Parameters outside of ``layers`` are trained as well, by each client for itself, unless the Trainer's ``trainable``
freezes them. Low-rank adapters are layers like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._check import Positive, Share
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver
from ..local.precision import Precision, PrecisionBlock
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.noise.symmetric import smat, svec
from .base import Algorithm, Problem, Released, State
from .cohort import Cohort, Own, personal_fields
from .finetune import visit_gradients
from .linear.solve import solve_regularized
from .private_prior import EDGE, FLOOR, LARGEST, RELEASE, check_one_round, clip_of, excess_of, matrix_signal, scale_of

Side = Literal["auto", "input", "output"]
_BLOCK = 1 << 23
_LEAST_LENGTH = 1e-140
_ROUNDING = 16


@dataclass(frozen=True)
class Part:
    """A tensor of parameters among the chosen layers, as a matrix: outputs by inputs, a vector as one column.

    Attributes:
        name: of the parameter.
        first: where it begins in a flat row of all parameters.
        shape: (rows, columns).
        columns: whether the covariance is of the columns (inputs), not of the rows (outputs).
    """

    name: str
    first: int
    shape: tuple[int, int]
    columns: bool

    @property
    def places(self) -> slice:
        """Return where it stands in a flat row."""
        return slice(self.first, self.first + self.shape[0] * self.shape[1])

    @property
    def width(self) -> int:
        """Return p, the number of rows and columns of the covariance."""
        return self.shape[1] if self.columns else self.shape[0]

    def matrix(self, rows: Tensor) -> Tensor:
        """Return the matrices of flat rows, the side of the covariance last: (..., D) -> (..., q, p)."""
        matrices = rows[..., self.places].reshape(*rows.shape[:-1], *self.shape)
        return matrices if self.columns else matrices.mT


@dataclass(frozen=True, kw_only=True)
class PriorLayers(Algorithm):
    """Layers of a network under a common prior, from one release of how clients change them.

    What a client hands to the release has a length of about 1 or less whatever it has learned, and is scaled by the
    clip norm, so that no bound on changes is needed.

    Args:
        layers: names of modules or parameters, such as ``("fc",)`` or ``("*.lora_B",)``; None: all that is trained.
        ridge: above 0, the pull (ridge / 2) ||w - w_0||^2 of local training.
        share: part of the budget for the mean direction, in [0, 1]; the rest is for the covariances. 1 suits clients
            that are all to move in one direction, 0 clients that differ along few directions.
        side: of the matrices, whose covariance is learned: ``"input"``, which inputs of a layer clients weigh
            differently; ``"output"``, in which of its outputs they differ; ``"auto"``: the shorter one. At most 512
            rows, and none at all of a vector.
        scale: length of what a client hands to its release, before the clip, if all of its change were along one
            direction; most are shorter. ``"auto"``: twice the clip norm of the run.
        local: the clients' local solver, before and after the release; with ``proximal`` it takes the pull exactly, and
            any ``ridge`` is stable.

    Raises:
        ConfigError: a value outside these ranges, or a step size too large for 20 ridge without the proximal step.

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

    layers: tuple[str, ...] | None = None
    ridge: Positive = 0.1
    share: Share = 0.0
    side: Side = "input"
    scale: Positive | Literal["auto"] = "auto"
    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1, epochs=5))

    name, title, colour = "prior_layers", "Private prior of layers", "#e91e90"

    def __post_init__(self) -> None:
        if self.layers is not None:
            if isinstance(self.layers, str) or not isinstance(self.layers, Iterable) or not self.layers:
                raise ConfigError(f"PriorLayers.layers is {self.layers!r}; give a tuple of names, such as ('fc',).")
            object.__setattr__(self, "layers", tuple(self.layers))
        super().__post_init__()
        LocalSolver.check_given(self, self.local, self.ridge / FLOOR)

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> PriorLayers:
        """Take twice the clip norm for ``scale``, 2 without privacy."""
        return replace(self, scale=2 * clip_of(privacy)) if self.scale == "auto" else self

    # What it releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declare the one release: rows of sqrt(share) u and of sqrt(1 - share) M of every matrix, times ``scale``.

        The parts of M are symmetric, and stand in the row under an isometry (:func:`svec`), so that the length of a row
        is share + (1 - share) sum ||M||_F^2, where a sum over matrices is at most sum (e^2 + e^2) <= 2, and less where
        the two moments overlap. The clip sees to it that the whole row is no longer than C, so that the sum moves by at
        most C in L2 norm where a client is added or removed, and by 2 C where one is replaced: one Gaussian release of
        all parts. What a client does with the answer stays with it.
        """
        if problem.protects_records:
            raise ConfigError(
                "PriorLayers releases what whole clients have learned, and has no release for single records: use "
                "privacy=client."
            )
        check_one_round(self, problem, schedule)
        sizes = self._sizes(problem)
        if not sum(sizes):
            raise ConfigError(
                "PriorLayers.layers are vectors, which have no covariance; with share=0 nothing is released. Choose "
                "layers with matrices, or a share above 0."
            )
        return (ReleasePlan(name=RELEASE, dimension=sum(sizes), uses=1),)

    def shared_parts(self, problem: Problem) -> tuple[Part, ...]:
        """Return the tensors of the chosen layers, in the order of the flat parameters.

        Raises:
            ConfigError: a layer that the network does not have, or a covariance of more than 512 rows.
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
        if large and self.share < 1:
            raise ConfigError(
                f"PriorLayers: the covariance of {large[0].name} on the {'in' if large[0].columns else 'out'}put side "
                f"has {large[0].width:,} rows, of at most {LARGEST}; choose other layers, the other side, or share=1."
            )
        return tuple(parts)

    def _sizes(self, problem: Problem) -> list[int]:
        """Return the lengths of the parts of a row: of all directions, then of the covariance of every matrix."""
        parts = self.shared_parts(problem)
        first = sum(part.shape[0] * part.shape[1] for part in parts) if self.share > 0 else 0
        return [first, *(part.width * (part.width + 1) // 2 for part in self._matrices(parts))]

    def _matrices(self, parts: tuple[Part, ...]) -> list[Part]:
        """Return the parts with a covariance."""
        return [part for part in parts if part.width > 1] if self.share < 1 else []

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start without a signal.

        Public, float64: ``centre`` (D,), m in units of the length of a client's change, and of every matrix, by name,
        ``directions/`` (p, p), columns of length 1, and ``excess/`` (p,), what mean(M) has along them, of sum 0.
        Private: ``model`` (n, D), ``length`` (n,), that of the change, and ``known`` (n, matrices), a client's b e.
        """
        parts = self._matrices(self.shared_parts(problem))
        public = {"centre": torch.zeros(problem.dimension, dtype=torch.float64)}
        for part in parts:
            public[f"directions/{part.name}"] = torch.eye(part.width, dtype=torch.float64)
            public[f"excess/{part.name}"] = torch.zeros(part.width, dtype=torch.float64)
        fields = {"length": ((), torch.float64), "known": ((len(parts),), torch.float64)}
        return State(public, problem.client_store({**personal_fields(problem), **fields}))

    def client(self, c: Cohort) -> tuple[dict[str, Tensor], Own]:
        own, rows = self._before(c)
        return {RELEASE: scale_of(self) * rows}, own

    def _before(self, c: Cohort) -> tuple[Own, Tensor]:
        """Return what clients keep after the first training, and what they hand to the release, unscaled."""
        problem, parts = c.problem, self.shared_parts(c.problem)
        start = c.initial.expand(len(c.ids), -1)
        own = c.keep(self._train(c, start, self.ridge), start)
        size = max(1, _BLOCK // max(1, problem.dimension, *(part.width**2 for part in self._matrices(parts))))
        pieces = [
            self._rows(problem, parts, own["model"][at], c.ids[at]) for at in torch.arange(len(c.ids)).split(size)
        ]
        rows, lengths, determined = (torch.cat(of) for of in zip(*pieces, strict=True))
        return {**own, "length": lengths.to(own["length"]), "known": determined.to(own["known"])}, rows

    def _train(self, c: Cohort, start: Tensor, lam: float | Precision) -> Tensor:
        """Return the models (k, D) after local training from ``start`` (k, D), with a pull to it."""
        return c.train(self.local, start, lam=lam, anchor=start)

    def _rows(
        self, problem: Problem, parts: tuple[Part, ...], models: Tensor, clients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what clients with models (k, D) hand to the release, zero for a change that is within rounding, the
        lengths of their changes (k,), and b e of every matrix (k, matrices)."""
        changes = (models - problem.initial).double().cpu()
        chosen = torch.cat([changes[:, part.places] for part in parts], dim=1)
        lengths = chosen.norm(dim=1)
        first = torch.cat([problem.initial[part.places] for part in parts])
        moved = lengths > max(_ROUNDING * torch.finfo(first.dtype).eps * float(first.norm()), _LEAST_LENGTH)
        inverse = torch.where(moved, 1 / lengths.clamp_min(_LEAST_LENGTH), 0.0)[:, None]
        pieces, determined = [math.sqrt(self.share) * inverse * chosen] if self.share > 0 else [], []
        matrices = self._matrices(parts)
        for part, response in zip(matrices, self._responses(problem, matrices, clients), strict=True):
            change = part.matrix(inverse * changes)
            moment = torch.bmm(change.mT, change)
            energy, trace = _trace(moment), _trace(response)
            null = (energy / trace.clamp_min(_LEAST_LENGTH))[:, None, None] * response
            beyond = torch.where((trace > 0)[:, None, None], moment - null, 0.0)  # no gradient says nothing
            pieces.append(math.sqrt(1 - self.share) * svec(beyond))
            determined.append(energy * trace / part.width)
        empty = lengths.new_zeros(len(lengths), 0)
        return torch.cat(pieces, dim=1), lengths, torch.stack(determined, dim=1) if determined else empty

    def _responses(self, problem: Problem, matrices: list[Part], clients: Tensor) -> list[Tensor]:
        """Return B of every matrix, (k, p, p) each: what the records of a client determine in local training."""
        moments = [torch.zeros(len(clients), part.width, part.width, dtype=torch.float64) for part in matrices]

        def add(place: int, gradients: Tensor) -> None:
            for part, moment in zip(matrices, moments, strict=True):
                rows = part.matrix(gradients.double()).reshape(-1, part.width)
                moment[place] += (rows.mT @ rows).cpu()

        if matrices:
            visit_gradients(problem, problem.initial, clients, add)
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

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        parts, new = self.shared_parts(problem), dict(public)
        values = released.values[RELEASE].cpu() / scale_of(self)
        noise, clients = float(released.noise_std(RELEASE)) / scale_of(self), released.denominator
        mean, *seconds = values.split(self._sizes(problem))
        if self.share > 0:
            # sampled directions: a coordinate of the mean of m directions in d dimensions has variance 1 / (d m)
            spread = math.hypot(noise / math.sqrt(self.share), (len(mean) * clients) ** -0.5)
            centre = torch.zeros_like(public["centre"])
            for part, mean_of_part in zip(parts, mean.split([math.prod(part.shape) for part in parts]), strict=True):
                shrunk = shrunk_matrix(mean_of_part.view(part.shape) / math.sqrt(self.share), spread)
                centre[part.places] = shrunk.flatten()
            new["centre"] = centre
        for part, second in zip(self._matrices(parts), seconds, strict=True):
            # and of D^T D / ||D||^2 of q rows a diagonal entry has about 2 / (p^2 q m)
            rows, middle = math.prod(part.shape) // part.width, part.matrix(new["centre"])
            spread = math.hypot(noise / math.sqrt(1 - self.share), (2 / (rows * clients)) ** 0.5 / part.width)
            beyond = smat(second) / math.sqrt(1 - self.share) - middle.mT @ middle
            new[f"excess/{part.name}"], new[f"directions/{part.name}"] = excess_of(matrix_signal(beyond, spread))
        return new

    def receive(self, c: Cohort) -> Own:
        # every client trains again from the centre, where something stands out of the noise
        return {**c.own, "model": self._again(c)}

    def _again(self, c: Cohort) -> Tensor:
        """Return the models (k, D) under the prior; that of local training where there is no signal, or where training
        ends in numbers that are not finite."""
        parts = self._matrices(self.shared_parts(c.problem))
        if not any(bool(c.public[name].any()) for name in ("centre", *(f"excess/{part.name}" for part in parts))):
            return c.own["model"]
        lengths = c.own["length"]
        centre = lengths[:, None] * c.public["centre"].to(lengths.device)
        models = self._train(c, c.initial + centre.to(c.initial), self._precision(c.public, parts, c.own))
        return torch.where(models.isfinite().all(dim=1)[:, None], models, c.own["model"])

    def _precision(self, public: Mapping[str, Tensor], parts: list[Part], own: Own) -> Precision:
        """Return P of clients; it is the same everywhere but for their own b e."""
        blocks = []
        for at, part in enumerate(parts):
            excess, like = public[f"excess/{part.name}"], own["model"]
            along = excess > excess.min()  # all the others are alike
            levels = torch.cat([excess[along], excess.min()[None]]).to(own["known"].device)
            determined = own["known"][:, at, None]
            variances = 1 + torch.where(determined > 0, part.width * levels / determined.clamp_min(_LEAST_LENGTH), 0.0)
            strengths = (self.ridge / variances.clamp(FLOOR, part.width / FLOOR)).to(like)
            directions = public[f"directions/{part.name}"][:, along].to(like)
            blocks.append(
                PrecisionBlock(part.first, part.shape, part.columns, directions, strengths[:, :-1], strengths[:, -1])
            )
        return Precision(self.ridge, tuple(blocks))

    def personal(self, c: Cohort) -> Tensor:
        """Return the clients' own models; a client that never took part trains twice, then under the prior."""
        return c.personal(lambda new: self._again(replace(new, own=self._before(new)[0])))

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Return what was made of the release, see :meth:`init`: all of it is 0 where nothing stands out of the noise,
        but for the ``directions/``."""
        return {name: value.clone() for name, value in state.public.items()}


def shrunk_matrix(matrix: Tensor, noise: float) -> Tensor:
    """Return what stands out of the noise in a matrix (rows, columns), shrunk for the least squared error.

    Independent noise of standard deviation s has singular values up to s (sqrt(rows) + sqrt(columns)). One above
    1.05 times that becomes sqrt((y^2 - s^2 (rows + columns))^2 - 4 s^4 rows columns) / y (Gavish and Donoho, "Optimal
    shrinkage of singular values", IEEE Transactions on Information Theory 2017, eq. 7); the others become 0.
    So do all where the limit is 1 or more, since a mean of matrices of length 1 at most is no longer than that.

    Args:
        matrix: with noise.
        noise: s, at least 0.
    """
    rows, columns = matrix.shape
    limit = EDGE * noise * (math.sqrt(rows) + math.sqrt(columns))
    if limit >= 1:
        return torch.zeros_like(matrix)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = (values.square() - noise**2 * (rows + columns)).square() - 4 * noise**4 * rows * columns
    shrunk = torch.where(values > limit, inner.clamp_min(0.0).sqrt() / values.clamp_min(1e-300), 0.0).clamp_max(1.0)
    return (left * shrunk) @ right


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
