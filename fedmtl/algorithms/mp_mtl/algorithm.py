"""MP-MTL: model-protected multi-task learning by perturbing the covariance of the models.

Liang, Liu, Zhou, Jiang, Zhang, Wang: "Model-Protected Multi-Task Learning", IEEE TPAMI 2020.

    min_W sum_i L_i(w_i) + lam g(W)                                                         (1)
    with g the nuclear norm, (2) and Algorithm 2, or the L2 norms of rows, (3) and Algorithm 3
    min_{P,Q} sum_i L_i(p_i + q_i) + lam g(P) + own_lam h(Q),   W = P + Q          (23), Algorithm 4

Every L_i includes (ridge / 2) ||w_i||^2. With ``curator_epsilon`` every task adds noise to its
own clipped model before it leaves (Algorithm 5).

In every iteration a trusted curator receives the models of all tasks, clips them, releases their
covariance with noise, and answers with a public linear map M made of it (:mod:`.sharing`). Each
task applies M to its own model and takes a gradient step on its own data. By the steps of Algorithm
1, with eta = 1 / L (for W = P + Q, 1 / (2 L)):

    wc_i   = w_i / max(1, ||w_i||_2 / C),   C = clip_norm                              Step 3
    Sigma  = sum_i wc_i wc_i^T + E + shift I,   E symmetric noise                      Steps 4, 5
    M      = U diag(s) U^T,   s_j = max(0, 1 - eta lam / sqrt(l_j)),  U diag(l) U^T = Sigma   Step 6
             or diag(s),   s_j = max(0, 1 - eta lam / sqrt(Sigma_jj))                  (Algorithm 3)
    wh_i   = M w_i                                                                     Step 7
    z_i    = wh_i + b_t (wh_i - wh_i of before)
    w_i    = z_i - eta grad L_i(z_i)

wh_i is w_i with a hat. In the state ``w`` is w_i, ``w_hat`` is wh_i of before, ``covariance`` is
Sigma and ``map`` is M, see :meth:`MPMTL.init`. The release does the clip of Step
3, the sum of Step 4 and the noise of Step 5; M and b_t are in :mod:`.sharing`. The paper differs: E
is Wishart noise, which protects nothing, there is no shift, and Step 7 projects the clipped wc_i
(:mod:`fedmtl.contrib.published.mp_mtl`). C is its K. In Algorithm 4 the lines above are about p_i.
Each task also has q_i, which it never releases. It makes the same step from prox_{eta own_lam
h}(q_i) instead of M q_i, and both gradients are taken at the sum of the two.

Without noise and clip this is proximal gradient descent. Algorithm 1 also allows the covariance of
the tasks, W^T W (n x n), for other penalties; it is left out, since one task moves a whole row and
column of it, and neither of the two penalties can be computed from it by tasks that keep their
models. The protected unit is a task with its model and all its data, the observers are the other
tasks and the public.

    Trainer(algorithm=MPMTL(lam=0.1, feature_norm=1.0, target=3.0), data=data,
            model=models.linear_regression(bias=False), schedule=FullParticipation(),
            privacy=ClientPrivacy(clip_norm=5.0, epsilon=1.0), rounds=10).fit()

If the shift ``rho`` is at least 1.25, M tends to the identity as the noise grows, and every task
then follows gradient descent on its own loss, from its own fit. A bias is each task's own: it is
neither penalized, nor shared, nor released.

:class:`~fedmtl.contrib.private_prior.PrivatePrior`, which is not in the paper, releases the
covariance a single time, with all of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._check import Finite, NonNegative, Positive
from ...errors import ConfigError
from ...local.proximal import PENALTIES, OwnPenalty, SharedPenalty
from ...privacy import BoundSampler, ReleasePlan
from ...privacy.row_noise import RowNoise
from ...privacy.samplers import BoundFull
from ..base import Problem, Public, State
from ..client_batch import ClientBatch, ClientStates
from ..linear.stack import TaskAlgorithm, TaskLoss
from ..local_fit import LocalFit
from ..rounds import Released
from .sharing import (
    FORMS,
    Momentum,
    budget_weights,
    map_of,
    mapped,
    momentum_weight,
    shifted_covariance,
)

RELEASE = "covariance"


@dataclass(frozen=True, kw_only=True)
class MPMTL(TaskAlgorithm):
    """Trains linear models of all tasks by a private covariance of the models (Liang et al. 2020).

    It has Algorithms 1 to 5 of the paper.

    Args:
        loss: ``"squared"``: L_i(w) = (1 / (2 n_i)) ||X_i w - y_i||^2, or ``"logistic"``, the mean
            over the records.
        lam: lambda (that of P if W = P + Q), at least 0. The threshold on singular values, or norms
            of rows, of W is ``lam`` eta; a tenth of the clip norm is a good one to begin with.
        penalty: g, ``"nuclear"`` (low rank) or ``"l21"`` (features used by all tasks or none).
        own_penalty: h of the tasks' own parts Q, W = P + Q: ``"l1"`` (sum of abs(q_ij)), ``"l2"``
            (sum of the ||q_i||_2), ``"frobenius"`` (||Q||_F^2 / 2), or None for W = P. It costs no
            privacy.
        own_lam: its strength; None: 0.1.
        momentum: ``"none"``, ``"nesterov"``, (t - 1) / (t + 2), or ``"strongly_convex"``,
            (1 - sqrt(mu / L)) / (1 + sqrt(mu / L)) with mu = ``ridge``.
        ridge: mu: (mu / 2) ||w_i||^2 is added to every L_i. Above 0, single-task learning stays at
            its start, so ever more noise leaves every task at its own fit.
        rho: the public shift of the noised covariance, in multiples of sigma_t sqrt(2 d), with
            sigma_t the standard deviation of the noise on a diagonal entry and d the number of
            features. With at least 1.25 every task tends to single-task learning as noise grows. A
            smaller one gains more if the noise is small, and breaks that promise if it is large.
        alpha, q: the budget of iteration t is prop. to t^alpha, or to q^-t. Neither: the best by
            the utility bound.
        start_ridge: of W^(0), each task's own ridge fit. ``None``: ``ridge``, or 0.01 if that is 0.
        feature_norm: B, a public bound on the L2 norm of a record's features, which are scaled down
            to it in training and wherever the models are used; the 1 of a bias stays. ``"auto"``:
            the bound that the data state. If they state none, a run without privacy leaves all rows
            as they are, and one with privacy is refused. None: no bound, without privacy only.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off.
            ``"auto"``: that of the data, if they state one. None: 2^40.
        curator_epsilon: total epsilon of a task's data, and so of each of its records, against the
            curator: every task adds L2-Laplace noise to its clipped model in every iteration
            (Algorithm 5). The report has it and the epsilon of the models against the other tasks.
            None trusts the curator.
        curator_delta: of that epsilon; None takes that of the models.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, MPMTL, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=MPMTL(lam=0.1),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    loss: TaskLoss = "squared"
    lam: NonNegative = 0.1
    penalty: SharedPenalty = "nuclear"
    own_penalty: OwnPenalty | None = None
    own_lam: NonNegative | None = None
    momentum: Momentum = "none"
    ridge: NonNegative = 0.01
    rho: NonNegative = 1.5
    alpha: Finite | None = None
    q: Positive | None = None
    start_ridge: Positive | None = None
    curator_epsilon: float | None = None
    curator_delta: float | None = None

    name = "mp_mtl"
    title = "MP-MTL"
    colour = "#c1272d"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum == "strongly_convex" and self.ridge == 0:
            needs = "needs ridge above 0, the constant mu"
            raise ConfigError(f"MPMTL.momentum='strongly_convex' {needs}.")
        if self.alpha is not None and self.q is not None:
            choices = "alpha (eps_t prop. to t^alpha) or q (eps_t prop. to q^-t)"
            raise ConfigError(f"MPMTL: give {choices}, not both.")
        if self.curator_delta is not None and self.curator_epsilon is None:
            raise ConfigError("MPMTL.curator_delta needs curator_epsilon.")
        if self.own_penalty is None and self.own_lam is not None:
            without = "there is no own_penalty that it could weigh"
            raise ConfigError(f"MPMTL.own_lam is {self.own_lam!r}, but {without}.")
        self._rows()  # refuses values that are no epsilon and delta

    # Releases

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the covariance of the models of all tasks: (d, d), or (d,) with
        ``penalty="l21"``.

        Raises:
            ConfigError: a schedule in which not all tasks take part in every round.
        """
        if not isinstance(schedule, BoundFull):
            accepted = "the schedule must be full, FullParticipation()"
            everybody = "MPMTL: all tasks take part in every round"
            raise ConfigError(f"{everybody}; {accepted}, not {schedule.describe()}.")
        weights = self.budget(problem)
        allocation = None  # an equal part for every round
        if min(weights) != max(weights):
            allocation = weights
        covariance = ReleasePlan(
            name=RELEASE,
            dimension=self.features(problem),
            form=FORMS[self.penalty],
            allocation=allocation,
            rows=self._rows(),
        )
        return (covariance,)

    def budget(self, problem: Problem) -> tuple[float, ...]:
        """Returns the weights of the rounds in the budget.

        Args:
            problem: of the run, for the number of rounds.

        Returns:
            One weight above 0 a round, of mean 1.
        """
        return budget_weights(
            problem.rounds,
            momentum=self.momentum,
            condition=self.ridge * self._step_size(problem),
            alpha=self.alpha,
            q=self.q,
        )

    # A run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts from W^(0), in private: each task's own fit.

        The public state, for R replicates, float64: ``covariance``, the released covariance of the
        last iteration with its shift, (R, d, d), or (R, d) with ``penalty="l21"``; and ``map``, its
        M.

        The tasks' states, (n, R, D) float64: ``w``, w_i, which the next iteration sends, and
        ``w_hat``, wh_i of the last one, the model of the task. With W = P + Q they are p_i and
        ph_i, and there are ``q`` and ``q_hat``, (n, R, d), of Q.
        """
        tasks = self.tasks(problem)
        d = self.features(problem)
        shape: tuple[int, ...] = (replicates, d)
        if FORMS[self.penalty] == "symmetric":
            shape = (replicates, d, d)
        covariance = torch.zeros(shape, dtype=torch.float64)
        sizes = {"w": tasks.data.dimension, "w_hat": tasks.data.dimension}
        if self.own_penalty is not None:
            sizes["q"] = d
            sizes["q_hat"] = d
        fields = {name: ((replicates, size), torch.float64) for name, size in sizes.items()}
        store = problem.client_store(fields)
        fits = tasks.fit(self._start_ridge)[:, None, :].expand(-1, replicates, -1)
        first = {"w": fits.clone(), "w_hat": fits.clone()}
        store.scatter_all(torch.arange(problem.clients), first)
        return State({"covariance": covariance, "map": covariance.clone()}, store)

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Sends the tasks' models without a bias, see :meth:`sent_rows`."""
        # Step 3: every task sends its model without a bias. The release clips the models, adds up
        # their products and adds noise.
        return {RELEASE: self.sent_rows(c)}, c.states

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Makes the map M of the released covariance."""
        # The release has done Steps 3 to 5. Its mean becomes the sum again, with a public shift.
        form = FORMS[self.penalty]
        covariance = shifted_covariance(released, RELEASE, form, self.rho)
        # Step 6: M; eigenvalues below 0 count as 0.
        threshold = self._step_size(problem) * self.lam
        return {"covariance": covariance, "map": map_of(covariance, form, threshold)}

    def receive(self, c: ClientBatch) -> ClientStates:
        """Projects the tasks' own models by M, and takes their gradient steps."""
        # Step 7: every task projects its own model, and takes an accelerated gradient step on its
        # own data. Products are of replicates (R, k, D), the store has (k, R, D).
        states = {name: value.transpose(0, 1) for name, value in c.states.items()}
        d = self.features(c.problem)
        eta = self._step_size(c.problem)
        weight = momentum_weight(self.momentum, c.round, self.ridge * eta)
        w_hat = states["w"].clone()
        w_hat[..., :d] = mapped(c.public["map"], self.projected_rows(c))
        z = w_hat + weight * (w_hat - states["w_hat"])
        new = {"w_hat": w_hat}
        if self.own_penalty is None:
            new["w"] = z - eta * self._gradient(c.problem, z)
        else:
            # Algorithm 4: z is the extrapolated p_i, y the extrapolated q_i
            q_hat = PENALTIES[self.own_penalty].prox(states["q"], eta * self._own_lam)
            y = q_hat + weight * (q_hat - states["q_hat"])
            gradient = self._gradient(c.problem, _sum(z, y))
            new["w"] = z - eta * gradient
            new["q"] = y - eta * gradient[..., :d]
            new["q_hat"] = q_hat
        return {name: value.transpose(0, 1) for name, value in new.items()}

    def projected_rows(self, c: ClientBatch) -> Tensor:
        """Returns the models that the tasks project, without a bias: (R, k, d).

        They are the tasks' own, and never leave them. In the published form of the method they are
        the clipped ones, see :mod:`fedmtl.contrib.published.mp_mtl`.

        Args:
            c: the tasks with their states.
        """
        return c.states["w"][..., : self.features(c.problem)].transpose(0, 1)

    def sent_rows(self, c: ClientBatch) -> Tensor:
        """Returns the same models as rows of the release: (R, k, d), or (k, d) of a single run.

        Args:
            c: the tasks with their states.
        """
        # of this class: those of the published form are made of these rows
        rows = MPMTL.projected_rows(self, c)
        if len(rows) == 1:
            return rows[0]
        return rows

    def fits(self, states: ClientStates) -> Tensor:
        """Returns the models wh_i; they are p_i + q_i if W = P + Q.

        Args:
            states: of the tasks.

        Returns:
            (k, R, D) float64.
        """
        if self.own_penalty is None:
            return states["w_hat"]
        return _sum(states["w_hat"], states["q_hat"])

    def parts(self, problem: Problem, state: State, personal: Tensor) -> dict[str, Tensor]:
        """Returns the last release and, if W = P + Q, both summands; float64.

        Returns:
            ``covariance``, that of the models with its shift, (d, d), or (d,) with
            ``penalty="l21"``: its leading eigenvectors span the directions that the tasks share.
            ``map``, its M. ``P`` and ``Q``, (n, D), which are not private.
        """
        parts = {name: state.public[name][0].clone() for name in ("covariance", "map")}
        if self.own_penalty is not None:
            parts["P"] = state.private.whole("w_hat")[:, 0].clone()
            parts["Q"] = self.models(problem, state, torch.arange(problem.clients))[0] - parts["P"]
        return parts

    def local_baseline(self) -> LocalFit:
        """Returns the tasks' own fits W^(0), with which a run starts."""
        return LocalFit(
            loss=self.loss,
            ridge=self._start_ridge,
            feature_norm=self.feature_norm,
            target=self.target,
        )

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Returns sum_i L_i + lam g (+ own_lam h) of the projected models on the training records,
        (R,) float64.

        It is not private.
        """
        d = self.features(problem)
        models = self.models(problem, state, torch.arange(problem.clients))
        losses = self.tasks(problem).value(models.transpose(0, 1)).sum(0)
        total = losses + self.ridge / 2 * models.square().sum((1, 2))
        shared = state.private.whole("w_hat").transpose(0, 1)
        total = total + self.lam * PENALTIES[self.penalty].value(shared[..., :d])
        if self.own_penalty is not None:
            own = state.private.whole("q_hat").transpose(0, 1)
            total = total + self._own_lam * PENALTIES[self.own_penalty].value(own)
        return total

    # Constants and gradients

    @property
    def _own_lam(self) -> float:
        if self.own_lam is None:
            return 0.1
        return self.own_lam

    @property
    def _start_ridge(self) -> float:
        return self.start_ridge or self.ridge or 0.01

    def _rows(self) -> RowNoise | None:
        if self.curator_epsilon is None:
            return None
        return RowNoise(self.curator_epsilon, self.curator_delta)

    def _gradient(self, problem: Problem, point: Tensor) -> Tensor:
        """Returns the gradients of the L_i with the ridge, (R, k, D)."""
        gradient = self.tasks(problem).gradient(point.transpose(0, 1)).transpose(0, 1)
        return gradient + self.ridge * point

    def _step_size(self, problem: Problem) -> float:
        """Returns eta = 1 / L, L with the ridge; 1 / (2 L) if W = P + Q.

        The joint gradient of P and Q has the constant 2 L.
        """
        data = self.tasks(problem).linear.smoothness(self.largest_row(problem))
        constant = data + self.ridge
        if self.own_penalty is not None:
            constant *= 2.0
        return 1.0 / constant


def _sum(shared: Tensor, own: Tensor) -> Tensor:
    """Returns p + q for models with a bias (..., D) and q without (..., d)."""
    return shared + F.pad(own, (0, shared.shape[-1] - own.shape[-1]))
