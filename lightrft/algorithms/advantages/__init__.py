"""One advantage estimator per file; importing this package registers them."""
from lightrft.algorithms.advantages import (cpgd, dr_grpo, gae, gdpo, gpg, group_norm, grpo_passk, maxrl, opo,
                                            reinforce, reinforce_baseline, reinforce_pp, remax, rloo)

__all__ = [
    "cpgd", "dr_grpo", "gae", "gdpo", "gpg", "group_norm", "grpo_passk", "maxrl", "opo", "reinforce",
    "reinforce_baseline", "reinforce_pp", "remax", "rloo"
]
