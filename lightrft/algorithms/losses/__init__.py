"""Policy losses, one family per file; importing this package registers them."""
from lightrft.algorithms.losses import token_ratio, sequence_ratio, covariance

__all__ = ["covariance", "sequence_ratio", "token_ratio"]
