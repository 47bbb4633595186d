"""Personalization by averaging: every client weighs several models of its own by how well they
predict.

A client with n records (x_i, y_i) has four sources of a model: its own records (``local``), the
``shared`` model as it was released, that model with an intercept of the client's own
(``intercept``), and that model with slopes of its own that a ridge pulls to the shared ones
(``ridge``). It averages them with the weights

    w_m  ~  prior_m * (e_m + e / n)^(-n / 4),     e_m = (1 / n) sum_i (y_i - prediction of y_i by m
    fitted without i)^2

The likelihood of n residuals under a normal law whose variance is their most plausible one is
e_m^(-n / 2); that of residuals left out one at a time scores a model by predictions and not by its
fit (Geisser and Eddy, JASA 1979: predictive sample reuse). These residuals share records, so the
likelihood is tempered by 2, and e / n, with e the least e_m of the models of ``local``, keeps a
model that predicts a few records by chance from taking all the weight. An average loses less than a
choice: no model has to win, and no record is withheld from the run or from the final fit.

*The prior.* The released model errs by the differences between clients, and by its noise, the
square of which is in proportion to nu^2, see :func:`~fedmtl.algorithms.noise_level.noise_of`. A
model of n records and p parameters has an error of estimation in proportion to p / n while n > p,
and of the size of its target if n is smaller. Without noise the prior odds of ``local`` are 1 / 2
for real targets and 1 / 9 for classes; they rise by the ratio of the two errors:

    prior of local / prior of all others  =  odds * (1 + (nu_i / 4)^2 max(n / p, 1))

So the noise of the released model takes weight from it, and less if a client has few records, of
which its own models err as well. nu is in units of the public range of the target. A client whose
targets are spread less than those ranges usually allow feels more of the noise: for real targets
nu_i = nu max(1, .3 / s_i), with s_i the error of the client's own mean, left out one at a time. A
range that is ten times too wide thus does not hide the noise. A client with a single record has no
mean without it; there s_i is at most the error of the released model.

*Linear models, squared loss: in closed form.* Let z_i = (x_i - mean of x) / s be the client's
standardized features, with s_j^2 = (n var_j + 10 * .4^2) / (n + 10), and r_i = y_i - (prediction of
the base), with a base of zero (``local``) or the shared model. A model adds an intercept a and
slopes v to its base:

    min over a, v of  sum_i (r_i - a - v . z_i)^2 + kappa a^2 + lambda ||v||^2

As the z_i sum to zero, a and v separate. With Z = U S V^T, the fit is H r with

    H = 1 1^T / (n + kappa) + U diag(S^2 / (S^2 + lambda)) U^T,

and leaving record i out changes its residual to (r_i - (H r)_i) / (1 - H_ii) (Allen 1974: PRESS).
One decomposition gives all kappa and lambda. Infinite kappa or lambda leave the intercept or the
slopes of the base. ``local`` has kappa = 0, so that its mean is not penalized. Every base has the
same ten lambda, of equal weight: with few records, residuals left out favour slopes that follow the
records closely by chance, and if one base had more of them than the other, that would be a
difference between the two which nobody shared.

With few records the residuals do not outvote the prior, so the prior has to say how clients usually
differ: first in their level. The models on the shared base divide their weight so: an own
intercept without a penalty has .3, three penalties .2 each, and the intercept of the shared model
.1; each is spread evenly over the ten lambda.

*Votes.* A few rows do not tell how strong a penalty clients need; those of all clients do. In the
last rounds of automatic settings every client sends a vote u_i on the M candidates (those of
``local`` as one, with the error at which the weight is their mean):

    u_im  ~  mean of e_i over the candidates - e_im,     ||u_i|| = 1

with e_im + e / n for e_im, and for classes 1 - (hits + .1 log likelihood) / n. The released mean u
of these votes, with noise of the standard deviation s in each coordinate, enters the weights of
every client, including those of new clients:

    w_m  ~  prior_m * (e_m + e / n)^(-n / 4) * exp(min(15, 1 / (2 s)) u_m)

These are exponential weights by the mean loss of the clients, each in its own unit (Vovk 1990;
Littlestone and Warmuth 1994). The noise moves a log weight by half a unit at most. A vote has
length 1, so one client moves the sum of votes by 1 if its data are taken away, and by 2 if they are
replaced: it is clipped, noised and charged like the other rows of a run. One record can turn the
vote of its client, so that votes are not taken if single records are protected.

*Clients with a single record.* Whether a client's own model is better than a shared one depends on
how far its records differ, and a single record does not show that. If no client has two, no release
shows it either: the law of one record a client is the same whether a second one repeats the first
or has nothing in common with it. In the first case the error of ``local`` is as small as may be, so
that of all rules ``local`` to the digit alone is never worse by any factor. A client with a single
record therefore casts no vote (its row is zero), and averages nothing: it takes the one model with
the largest mean vote of the others, or ``local`` to the digit if noise alone explains how far that
vote is above the vote for ``local``. If nobody could vote, noise chooses another model in one of
740 runs at most (:func:`.candidates.choice_by_votes`).

*Other losses of a real target.* For the losses of Huber, of a quantile and of counts the shared
model is trained for that loss, and a candidate adds an intercept and slopes to its base that
minimize it (:mod:`.losses`). The grids of kappa and lambda, the priors and the votes are those of
squared errors. e_m is the mean loss of the records of each fold by the fit without them, squared
for a quantile, and the deviance for counts. kappa counts in records, or in counts. s_i is in units
of the model's outputs: for counts, whose outputs are logarithms, it is divided by their mean.

*Linear models of classes: in five folds.* The candidates are minimizers of the mean loss with a
pull

    min over w  (1 / n) sum_i loss_i(w) + (lambda / 2) ||w - w_0||^2,

w_0 = 0 (``local``) or the shared model (``ridge``), beside that model as it is (``shared``). A
model weighs

    w_m  ~  prior_m * exp(hits + .1 * log likelihood)

of the records of each fold by the fit without them, times the same factor by the votes. With few
records of a class the likelihood by itself chooses badly.

*Networks of classes: in five folds, along two paths.* The candidates are the models after 1, 4, 16
and 64 steps of :class:`~fedmtl.local.BackoffSGD` from the shared model (``ridge``: few steps are a
strong pull), after 16 and 64 from the public starting point (``local``), and the shared model as it
is, with the weights of classes. Models of one path are averaged; of the two paths a client takes
the one with more weight, since parameters of networks that have not moved together do not average.
The meaning of nu for networks is not known, and the prior is that without noise.

Every number is a function of the client's own records and of the releases.
"""

from .candidates import candidates_of, high_of, vote_on, votes_on
from .classes import ClassCandidates
from .fits import half_range, level_change, proximal_change
from .numbers import SLOPE_RIDGES, Candidates, Records, average_numbers, vote_size
from .personalization import Average, LocalAverage
from .weights import PARTS, noise_at, prior_of_local

__all__ = [
    "PARTS",
    "SLOPE_RIDGES",
    "Average",
    "Candidates",
    "ClassCandidates",
    "LocalAverage",
    "Records",
    "average_numbers",
    "candidates_of",
    "half_range",
    "high_of",
    "level_change",
    "noise_at",
    "prior_of_local",
    "proximal_change",
    "vote_on",
    "vote_size",
    "votes_on",
]
