"""Body of the commands that train on fixed data."""
from functools import partial
from typing import Any

from lightrft.config.cli import ParsedConfig
from lightrft.models.config_json import context_of
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.planned import limit_rows
from lightrft.trainer.hub_files import fetch_once
from lightrft.trainer.model_media import open_media
from lightrft.trainer.offline.offline_trainer import OfflineTrainer
from lightrft.trainer.session import training_session
from lightrft.trainer.trial import TrialContext


def train_rows(parsed: ParsedConfig, exits: bool, trainer: type[OfflineTrainer[Any]]) -> None:
    """Run the ``trainer`` of a command; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""
    config, data = parsed.config, parsed.config.data.as_data_config()
    with training_session(parsed, exits, TrialContext(trainer=trainer)) as session:
        path = config.model.pretrain
        fetch_once(session.strategy, config, data)
        limit_rows(config, parsed.provenance, context_of(path))
        tokenizer = load_tokenizer(path, data.chat_template)
        media = open_media(path, tokenizer, data, session.strategy)
        rows = trainer.read(config, tokenizer, "train", media)
        held_out = trainer.read(config, tokenizer, "eval", media) if config.held_out else []
        model = partial(trainer.load, config)  # loaded when the strategy prepares it
        trainer(config, session.strategy, model, tokenizer, rows, held_out, session.timer, media).fit()
