"""The private prior of networks: one release of a common covariance of the changes of layers.

Every client first trains its own copy of a public network by itself: w_i = w_0 + delta_i. A matrix
of its weights has a prior W_0 + Delta whose rows have a common covariance R on the columns of W (or
the other way round). One release of all clients estimates it, and each client minimizes

    l_i(w) + (1/2) (w - w_0)^T P_i (w - w_0),    P_i = ridge R_i^-1 in the columns of a matrix,
                                                 ridge times the identity elsewhere,

by the same local training as before, which is R = I: without a signal above the noise, a client
keeps the model of its first training, to the bit. The release has one row for each client: of every
matrix D in delta_i / ||delta_i||

    M = D^T D - (tr D^T D) B / tr B,    the part of D beyond the geometry of the client's records.

As for linear models (:mod:`.private_prior`), B = H (H + h I)^-1 is the part of a model that the
records determine when it is learned first. H is F / q: the second moment F of the gradients of
single records by the matrix at w_0, on that side, for each of its q rows, an empirical Fisher
information. h is the ridge and the effect of an early end, which adds 1 / (step size times steps)
for gradient descent (Ali, Kolter, Tibshirani 2019). With b = tr B / p, and e = tr D^T D, R_i = I +
p / (b e) mean(M). The server knows the law of the noise, and estimates mean(M) by
:func:`~.spectrum.matrix_signal`.

    public = ...  # a network that public data, or a private run, have trained
    Trainer(algorithm=PriorLayers(layers=("fc",), local=LocalSGD(lr=0.1, epochs=5)), data=data,
            model=public, schedule=FullParticipation(),
            privacy=ClientPrivacy(clip_norm=1.0, epsilon=3.0), rounds=1).fit()

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
from ..algorithms.base import Problem, Public, State
from ..algorithms.client_batch import ClientBatch, ClientStates, personal_fields
from ..algorithms.linear.solve import solve_regularized
from ..algorithms.own_gradients import own_gradients
from ..algorithms.rounds import Released
from ..algorithms.store import Fields
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver, check_names
from ..local.precision import Part, Precision, PrecisionBlock
from ..privacy import BoundSampler, ReleasePlan
from ..privacy.noise.symmetric import smat, svec
from .private_prior import FLOOR, LARGEST, LEAST_LENGTH, RELEASE, OneRelease
from .spectrum import excess_of, matrix_signal

Side = Literal["auto", "input", "output"]
_BLOCK = 1 << 23  # numbers of all changes and matrices that are held at once
_ROUNDING = 16  # a change of less than so many roundings of the start is none


@dataclass(frozen=True, kw_only=True)
class PriorLayers(OneRelease):
    """Trains layers of a network under a common prior, from one release of the clients' changes.

    A client's row has a length of about 1 or less for every change, and is scaled by the clip norm,
    so that no bound on changes is needed.

    Args:
        layers: names of modules or parameters, such as ``("fc",)`` or ``("*.lora_B",)``; None: all
            trained ones.
        ridge: above 0, the pull (ridge / 2) ||w - w_0||^2 of local training.
        side: of the matrices whose covariance is learned: ``"input"``, for clients that weigh the
            inputs of a layer differently; ``"output"``, for clients that differ in its outputs;
            ``"auto"``: the shorter one. At most 512 rows, and none at all of a vector.
        scale: length of a client's row before the clip, if all of its change were along one
            direction; most are shorter. ``"auto"``: twice the clip norm of the run.
        local: the clients' local solver, before and after the release; with ``proximal`` it takes
            the pull exactly, and any ``ridge`` is stable.

    Raises:
        ConfigError: a value outside these ranges, or a step size too large for 20 ridge without the
            proximal step.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, LocalSGD, PriorLayers, Trainer
        >>> from fedmtl import load_data, models
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

    # Releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the release: rows of M of every matrix, times ``scale``.

        Each M is symmetric and mapped to a part of the row by an isometry (:func:`svec`). The
        squared length of a row is sum ||M||_F^2 <= sum (e^2 + e^2) <= 2 of all matrices, and less
        if the two moments overlap. The clip bounds the whole row by C, so the sum moves by at most
        C in L2 norm if a client is added or removed, and by 2 C if one is replaced: one Gaussian
        release of all matrices. The client's use of the answer stays with it.
        """
        if problem.protects_records:
            raise ConfigError(
                "PriorLayers releases what whole clients have learned, and has no release for "
                "single records: use privacy=client."
            )
        self.check_one_round(problem, schedule)
        sizes = self._sizes(problem)
        if not sizes:
            vectors = "PriorLayers.layers are vectors, which have no covariance"
            raise ConfigError(f"{vectors}; choose layers with matrices.")
        return (ReleasePlan(name=RELEASE, dimension=sum(sizes)),)

    def shared_parts(self, problem: Problem) -> tuple[Part, ...]:
        """Returns the tensors of the chosen layers, in the order of the flat parameters.

        Args:
            problem: of the run.

        Raises:
            ConfigError: a layer that the network does not have, or a covariance of more than 512
                rows.
        """
        layout = problem.layout
        chosen = torch.ones(layout.dimension, dtype=torch.bool)
        if self.layers is not None:
            chosen = layout.places(self.layers, "PriorLayers.layers")
        parts = []
        large = []
        tensors = zip(layout.names, layout.shapes, layout.offsets, strict=False)
        for name, shape, first in tensors:
            if not bool(chosen[first]):
                continue
            rows = math.prod(shape[:1])
            columns = math.prod(shape[1:])
            on_inputs = self.side == "input" or (self.side == "auto" and columns <= rows)
            if len(shape) < 2:
                on_inputs = True  # a vector has one column, and no covariance
            part = Part(name, first, (rows, columns), on_inputs)
            if part.width > LARGEST:
                large.append(part)
            parts.append(part)
        if large:
            part = large[0]
            side = "output"
            if part.columns:
                side = "input"
            raise ConfigError(
                f"PriorLayers: the covariance of {part.name} on the {side} side has {part.width:,} "
                f"rows, of at most {LARGEST}; choose other layers, or the other side."
            )
        return tuple(parts)

    def _sizes(self, problem: Problem) -> list[int]:
        """Returns the lengths of the parts of a row, one for the covariance of every matrix."""
        return [part.width * (part.width + 1) // 2 for part in self.matrices(problem)]

    def matrices(self, problem: Problem) -> list[Part]:
        """Returns the chosen parts with a covariance.

        Args:
            problem: of the run.
        """
        return [part for part in self.shared_parts(problem) if part.width > 1]

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts without a signal.

        The public state, float64, has for every matrix, by name: ``directions/`` (p, p), columns of
        length 1, and ``excess/`` (p,), mean(M) along them, of sum 0. The clients' states: ``model``
        (n, D) and ``determined`` (n, matrices), a client's b e.
        """
        matrices = self.matrices(problem)
        public = {}
        for part in matrices:
            public[f"directions/{part.name}"] = torch.eye(part.width, dtype=torch.float64)
            public[f"excess/{part.name}"] = torch.zeros(part.width, dtype=torch.float64)
        determined: Fields = {"determined": ((len(matrices),), torch.float64)}
        fields: Fields = {**personal_fields(problem), **determined}
        return State(public, problem.client_store(fields))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains with the plain ridge, and sends the rows of the M of every matrix, times
        ``scale``.
        """
        states, rows = self._before(c)
        return {RELEASE: self.length * rows}, states

    def _before(self, c: ClientBatch) -> tuple[ClientStates, Tensor]:
        """Returns the clients' states after the first training, and their rows, unscaled."""
        start = c.initial.expand(len(c.clients), -1)
        states = c.keep(self._train(c, self.ridge), start)
        largest = max(part.width**2 for part in self.matrices(c.problem))
        size = max(1, _BLOCK // max(c.problem.dimension, largest))
        rows = []
        determined = []
        for at in torch.arange(len(c.clients)).split(size):
            of_piece, determined_of_piece = self._rows(
                c.problem, states["model"][at], c.clients[at]
            )
            rows.append(of_piece)
            determined.append(determined_of_piece)
        states["determined"] = torch.cat(determined).to(states["determined"])
        return states, torch.cat(rows)

    def _train(self, c: ClientBatch, lam: float | Precision) -> Tensor:
        """Trains from the public initial model, with a pull to it; returns the models (k, D)."""
        start = c.initial.expand(len(c.clients), -1)
        return c.train(self.local, start, lam=lam, anchor=start)

    def _rows(self, problem: Problem, models: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of clients, and b e of every matrix, (k, matrices).

        The row of a change within rounding is zero.

        Args:
            problem: of the run.
            models: (k, D).
            clients: int64 (k,).
        """
        parts = self.shared_parts(problem)
        matrices = self.matrices(problem)
        changes = (models - problem.initial).double().cpu()
        chosen = torch.cat([changes[:, part.places] for part in parts], dim=1)
        lengths = chosen.norm(dim=1)
        first = torch.cat([problem.initial[part.places] for part in parts])
        rounding = _ROUNDING * torch.finfo(first.dtype).eps * float(first.norm())
        moved = lengths > max(rounding, LEAST_LENGTH)
        inverse = torch.where(moved, 1 / lengths.clamp_min(LEAST_LENGTH), 0.0)[:, None]
        pieces = []
        determined = []
        responses = self._responses(problem, matrices, clients)
        for part, response in zip(matrices, responses, strict=True):
            change = part.matrix(inverse * changes)  # D
            moment = torch.bmm(change.mT, change)
            energy = _trace(moment)  # e
            trace = _trace(response)
            null = (energy / trace.clamp_min(LEAST_LENGTH))[:, None, None] * response
            # records without a gradient carry no information
            beyond = torch.where((trace > 0)[:, None, None], moment - null, 0.0)
            pieces.append(svec(beyond))
            determined.append(energy * trace / part.width)
        return torch.cat(pieces, dim=1), torch.stack(determined, dim=1)

    def _responses(self, problem: Problem, matrices: list[Part], clients: Tensor) -> list[Tensor]:
        """Returns B of every matrix, (k, p, p) each: the part determined by a client's records."""
        moments = []
        for part in matrices:
            shape = (len(clients), part.width, part.width)
            moments.append(torch.zeros(shape, dtype=torch.float64))
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
            damping = (self.ridge + early)[:, None, None]  # h
            response = solve_regularized(curvature + damping * eye, curvature)
            responses.append((response + response.mT) / 2)
        return responses

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Makes the prior of every matrix from its released mean."""
        new = dict(public)
        noise = float(released.noise_std[RELEASE]) / self.length
        means = (released.values[RELEASE].cpu() / self.length).split(self._sizes(problem))
        for part, mean in zip(self.matrices(problem), means, strict=True):
            # a diagonal entry of the mean of m matrices D^T D / ||D||^2 of q rows has a variance of
            # 2 / (p^2 q m)
            rows = math.prod(part.shape) // part.width
            spread = math.hypot(noise, (2 / (rows * released.denominator)) ** 0.5 / part.width)
            excess, directions = excess_of(matrix_signal(smat(mean), spread))
            new[f"excess/{part.name}"] = excess
            new[f"directions/{part.name}"] = directions
        return new

    def receive(self, c: ClientBatch) -> ClientStates:
        """Trains the clients once more, under the prior."""
        # every client trains again under the prior, if there is a signal above the noise
        return {**c.states, "model": self._again(c)}

    def _again(self, c: ClientBatch) -> Tensor:
        """Returns the models (k, D) under the prior.

        They are those of local training without a signal, or if training ends in numbers that are
        not finite.
        """
        matrices = self.matrices(c.problem)
        if not any(bool(c.public[f"excess/{part.name}"].any()) for part in matrices):
            return c.states["model"]
        models = self._train(c, self._precision(c.public, matrices, c.states))
        return torch.where(models.isfinite().all(dim=1)[:, None], models, c.states["model"])

    def _precision(self, public: Public, matrices: list[Part], states: ClientStates) -> Precision:
        """Returns P of clients, which differ in their own b e alone."""
        like = states["model"]
        blocks = []
        for at, part in enumerate(matrices):
            excess = public[f"excess/{part.name}"]
            along = excess > excess.min()  # all the others are alike
            levels = torch.cat([excess[along], excess.min()[None]]).to(states["determined"].device)
            determined = states["determined"][:, at, None]
            # R_i = I + p / (b e) mean(M); the identity without any determined part
            beyond = part.width * levels / determined.clamp_min(LEAST_LENGTH)
            variances = 1 + torch.where(determined > 0, beyond, 0.0)
            strengths = (self.ridge / variances.clamp(FLOOR, part.width / FLOOR)).to(like)
            directions = public[f"directions/{part.name}"][:, along].to(like)
            blocks.append(PrecisionBlock(part, directions, strengths[:, :-1], strengths[:, -1]))
        return Precision(self.ridge, tuple(blocks))

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the clients' own models.

        A client that never took part trains twice, the second time under the prior.
        """
        newcomers = c.part(c.newcomers)
        if not len(newcomers.clients):
            return c.states["model"]
        states, _ = self._before(newcomers)
        return c.with_newcomers(self._again(replace(newcomers, states=states)))

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns the prior by the release, see :meth:`init`.

        All but the ``directions/`` is 0 without a signal above the noise.
        """
        return {name: value.clone() for name, value in state.public.items()}


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
