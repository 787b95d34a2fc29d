"""Losses of one supervised row: how far the draft's distribution q is from the target's p over the draft vocabulary.

Pure functions of logits; each states its gradient in closed form, which the fused kernels mirror. z are the draft's
logits and y the target's, both divided by `temperature` (their gradients carry its 1 / temperature), and

    q_v = exp(z_v - lse(z))             the draft's distribution
    r_v = exp(y_v - lse(y))             the target's, renormalised over the draft vocabulary: sum_v r_v = 1
    p_v = exp(y_v - L)                  the target's own: L is the log-sum-exp over its FULL vocabulary, sum_v p_v <= 1

p = r where the draft vocabulary is the full one. A token outside the draft vocabulary has q = 0: it adds nothing to a
loss on r, and a row's whole mass may lie there. Logits are kept above `LEAST_LOGIT`, so -inf counts as "never" and
every loss is finite; where it cuts, the gradient is 0.

Shape suffixes: R rows, V draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.config_train import LossName, TrainConfig

# exp of it is 0 in float32 beside any usual logit, and sums of it stay far from overflow.
LEAST_LOGIT = -1.0e4


@dataclass(frozen=True)
class LossOptions:
    """What training minimises; the default is what every evaluation reports.

    Attributes:
        name: a key of `LOSSES`.
        temperature: divides the logits of draft and target.
        lk_eta: of `lk_lambda`.
        rejected_weight: 0 to 1, what the loss of a row at step j is multiplied by where an earlier step's draft at that
            row was not the reply's own token: the server rejects there, and never uses step j. It weighs gradients
            only: reported losses are without it, evaluation never has it. The mean is still over all supervised rows
            of a step, not over what the weights add up to. So a served pair weighs the same whatever this is and
            however many chains live, and a deep step that few chains reach moves the draft as little as it matters.
    """

    name: LossName = "soft_ce"
    temperature: float = 1.0
    lk_eta: float = 3.0
    rejected_weight: float = 1.0

    @staticmethod
    def of(config: TrainConfig) -> "LossOptions":
        """The options of a config."""
        return LossOptions(config.loss, config.loss_temperature, config.lk_eta, config.rejected_weight)

    @property
    def needs_full_vocabulary(self) -> bool:
        """Whether the loss is on p, which takes the target's log-sum-exp over its full vocabulary."""
        return self.name in ("soft_ce_full", "lk_alpha", "lk_lambda")


def row_losses(options: LossOptions, logits_RV: Tensor, target_RV: Tensor, full_lse_R: Tensor | None) -> Tensor:
    """Loss of every row, in nats for all but the LK losses.

    Args:
        options: which loss.
        logits_RV: the draft's logits.
        target_RV: the target's logits for the same tokens.
        full_lse_R: log-sum-exp of the target's logits / temperature over its full vocabulary; None: the draft
            vocabulary is the full one, or the loss does not ask.

    Returns:
        float32 [R].
    """
    z_RV, y_RV = (_tempered(x_RV.float(), options.temperature) for x_RV in (logits_RV, target_RV))
    return LOSSES[options.name](z_RV, y_RV, full_lse_R, options)


def _tempered(x_RV: Tensor, temperature: float) -> Tensor:
    # A division by one would be a pass over all logits, and another one backwards.
    return (x_RV if temperature == 1.0 else x_RV / temperature).clamp_min(LEAST_LOGIT)


def soft_ce(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None, options: LossOptions) -> Tensor:
    """Soft cross-entropy -sum_v r_v log q_v. Gradient in z: q - r."""
    return -(y_RV.softmax(-1) * z_RV.log_softmax(-1)).sum(-1)


def soft_ce_full(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None, options: LossOptions) -> Tensor:
    """Soft cross-entropy -sum_v p_v log q_v: rows whose mass lies outside the draft vocabulary weigh less.

    Gradient in z: (sum_u p_u) q - p.
    """
    return -(_log_p(y_RV, full_lse_R).exp() * z_RV.log_softmax(-1)).sum(-1)


def kl(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None, options: LossOptions) -> Tensor:
    """KL(r || q) = soft_ce - H(r), never below 0. Gradient in z: q - r, that of `soft_ce`."""
    log_r_RV = y_RV.log_softmax(-1)
    return (log_r_RV.exp() * (log_r_RV - z_RV.log_softmax(-1))).sum(-1)


def lk_alpha(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None, options: LossOptions) -> Tensor:
    """-log alpha, where alpha = sum_v min(p_v, q_v) is the acceptance probability of a sampled draft token.

    Source: Samarin et al. 2026, "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding"
    (arXiv:2602.23881), the negative log-acceptance loss; p is the full-vocabulary one, so alpha is the server's own.
    Gradient in z: (q_v / alpha) (B - b_v) with b_v = [q_v < p_v] and B = sum_u q_u b_u.
    """
    return -_log_alpha(z_RV, y_RV, full_lse_R)


def lk_lambda(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None, options: LossOptions) -> Tensor:
    """Hybrid: lambda KL(r || q) + (1 - lambda) (1 - alpha); lambda = exp(-lk_eta alpha) carries no gradient.

    Source: the hybrid loss of the same paper (eta = 3 is its best); 1 - alpha is the total variation distance of p and
    q over the full vocabulary. Lambda is the row's own, as in speculators' `lk_hybrid` loss. KL is over r, since over p
    it is infinite as soon as a token is outside the draft vocabulary.
    Gradient in z: lambda (q - r) + (1 - lambda) q_v (B - b_v), b and B as in `lk_alpha`.
    """
    alpha_R = _log_alpha(z_RV, y_RV, full_lse_R).exp()
    lambda_R = torch.exp(-options.lk_eta * alpha_R.detach())
    return lambda_R * kl(z_RV, y_RV, full_lse_R, options) + (1.0 - lambda_R) * (1.0 - alpha_R)


def _log_p(y_RV: Tensor, full_lse_R: Tensor | None) -> Tensor:
    return y_RV.log_softmax(-1) if full_lse_R is None else y_RV - full_lse_R[:, None]


def _log_alpha(z_RV: Tensor, y_RV: Tensor, full_lse_R: Tensor | None) -> Tensor:
    """Log of sum_v min(p_v, q_v), by logarithms: finite however little p and q share."""
    log_p_RV, log_q_RV = _log_p(y_RV, full_lse_R), z_RV.log_softmax(-1)
    return torch.where(log_q_RV < log_p_RV, log_q_RV, log_p_RV).logsumexp(-1)


LossFunction = Callable[[Tensor, Tensor, Tensor | None, LossOptions], Tensor]
LOSSES: dict[LossName, LossFunction] = {
    "soft_ce": soft_ce,
    "soft_ce_full": soft_ce_full,
    "kl": kl,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
}
