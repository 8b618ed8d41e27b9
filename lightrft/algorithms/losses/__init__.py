"""One policy loss per file; importing this package registers them."""
from lightrft.algorithms.losses import (cispo, clip_cov, cpgd, dppo_kl, dppo_tv, gmpo, gpg, gspo, gspo_token, kl_cov,
                                        ppo, sapo)

__all__ = [
    "cispo", "clip_cov", "cpgd", "dppo_kl", "dppo_tv", "gmpo", "gpg", "gspo", "gspo_token", "kl_cov", "ppo", "sapo"
]
