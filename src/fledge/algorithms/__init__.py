"""Pure math: estimators, losses, reductions. Needs L0 and torch only; every backend calls the same
functions.
"""

from fledge.algorithms.advantages import ADVANTAGES
from fledge.algorithms.algorithm import Algorithm, make_algorithm, supervised
from fledge.algorithms.losses import LOSSES
from fledge.algorithms.reduce import REDUCTIONS, token_weights
from fledge.algorithms.tokens import Stats, Tokens, safe_ratio

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "REDUCTIONS",
    "Algorithm",
    "Stats",
    "Tokens",
    "make_algorithm",
    "safe_ratio",
    "supervised",
    "token_weights",
]
