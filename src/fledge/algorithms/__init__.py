"""Pure math: estimators, losses, corrections, reductions. Needs L0 and torch only; every backend
calls the same functions.
"""

from fledge.algorithms.advantages import ADVANTAGES
from fledge.algorithms.algorithm import Algorithm, make_algorithm, supervised
from fledge.algorithms.corrections import CORRECTIONS
from fledge.algorithms.kl import KL
from fledge.algorithms.losses import LOSSES
from fledge.algorithms.reduce import REDUCTIONS, token_weights
from fledge.algorithms.tokens import Stats, Tokens, safe_log_ratio, safe_logp, safe_ratio
from fledge.algorithms.trajectories import Trajectories, on_batch, whiten

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "KL",
    "LOSSES",
    "REDUCTIONS",
    "Algorithm",
    "Stats",
    "Tokens",
    "Trajectories",
    "make_algorithm",
    "on_batch",
    "safe_log_ratio",
    "safe_logp",
    "safe_ratio",
    "supervised",
    "token_weights",
    "whiten",
]
