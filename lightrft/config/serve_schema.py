"""Options of the reward model server."""
from dataclasses import dataclass

from lightrft.config.options import COUNT, NON_NEGATIVE, POSITIVE, option
from lightrft.config.reward_schema import RewardConfig
from lightrft.config.shared_schema import StrategyConfig, Tree
from lightrft.config.tree import group


@dataclass
class ServedModelConfig:
    """The reward models."""
    reward_pretrain: list[str] = option(
        [], "reward models, PATH or NAME=PATH: trained by lightrft rm, or sequence classifiers with one score. The "
        "rewards of several (rm1, rm2 ... without NAME) are added", common=True, path="models",
        required="give an HF folder or hub id of a reward model")
    reward: list[str] = option([], "weights of the models in the sum, NAME=WEIGHT; the default is 1")
    normalize_reward: bool = option(
        False, "normalize the scores of a model by mean and std of the rewards that its training "
        "measured", common=True)
    max_len: int = option(
        0, "longest text in tokens; a longer one is left unscored; 0: the context length of the "
        "model", within=NON_NEGATIVE, common=True)
    max_tokens_per_micro_batch: int = option(16384, "tokens per forward pass, at most (a longer text gets its own "
                                             "pass)", within=COUNT, common=True)
    value_head_prefix: str | None = option(
        None, "name of the head of a reward model in its files (default: as the model says, or its only head)")
    bf16: bool | None = option(None, "compute in bfloat16 (default: on CUDA, from Ampere on)")


@dataclass
class ServerConfig:
    """The address, and the limits of requests."""
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 accepts other machines, without any authentication",
                       common=True)
    port: int = option(5000, "port to listen on; 0: a free port, which is logged", within="[0, 65535]", common=True)
    max_texts: int = option(1024, "limit on texts per request; a request with more is refused", within=COUNT)
    max_body_mib: float = option(16.0, "limit on the body of a request in MiB; a larger one is refused without "
                                 "reading it", within=POSITIVE)
    request_timeout_s: float = option(
        60.0, "seconds that reading a request may take, and then scoring it; a later one is refused", within=POSITIVE)


@dataclass
class ServeConfig(Tree):
    """The whole option tree of ``lightrft.cli.serve_rm``."""
    model: ServedModelConfig = group(ServedModelConfig)  # type: ignore[assignment]  # several, which are not trained
    server: ServerConfig = group(ServerConfig)

    PREFLIGHT = "lightrft.preflight.inference.ServePreflight"
    GRANTS = {
        "batch_size": (r"[1-9]\d*", "rewards do not depend on it; --max_tokens_per_micro_batch bounds a pass"),
    }

    @property
    def folder(self) -> None:
        """None: a server writes nothing."""
        return None

    @property
    def seed(self) -> int:
        """0: nothing is random."""
        return 0

    @property
    def placement(self) -> StrategyConfig:
        """One process."""
        return StrategyConfig()

    def as_reward_config(self) -> RewardConfig:
        """Convert to the reward group of the RL trainer, which the reward manager reads."""
        m = self.model
        return RewardConfig(reward_pretrain=m.reward_pretrain, reward=m.reward, normalize_reward=m.normalize_reward)
