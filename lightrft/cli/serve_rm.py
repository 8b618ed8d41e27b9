"""Server of reward models: ``lightrft serve_rm --reward_pretrain RM --port 5000``; see docs/serve_rm.md."""
from collections.abc import Sequence

from lightrft.cli.command_line import parse_command
from lightrft.config.cli import ParsedConfig
from lightrft.config.serve_schema import ServeConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: every option of the tree, ``--config`` and ``--dry_run``."""
    serve(parse_command(argv, "lightrft serve_rm", "Score texts with reward models, over HTTP.", ServeConfig))


def serve(parsed: ParsedConfig) -> None:
    """Serve with parsed options until SIGTERM or Ctrl-C."""
    # imported after the command line is read: --help and mistakes do not wait for torch
    from lightrft.rewards.manager import RewardManager
    from lightrft.rewards.placement import ScorerSetup
    from lightrft.rewards.server import RewardServer
    from lightrft.strategy.base import StrategyBase
    from lightrft.trainer.prompt_trial import ReadPrompts
    from lightrft.trainer.session import training_session
    from lightrft.trainer.trial import TrialContext
    from lightrft.utils.logging import get_logger
    from lightrft.utils.watchdog import clear_stop_request, stop_requested
    config, m = parsed.config, parsed.config.model

    def load(strategy: StrategyBase) -> RewardManager:
        setup = ScorerSetup(strategy.device, bool(m.bf16), m.max_tokens_per_micro_batch, m.max_len,
                            head=m.value_head_prefix)
        with strategy.init_model_context():
            return RewardManager(config.as_reward_config(), setup=setup)

    def rehearse(strategy: StrategyBase, reads: Sequence[ReadPrompts]) -> None:
        load(strategy).shutdown()
        if not parsed.plan_gpus:  # whose machine has other ports
            RewardServer(config.server, lambda items: []).server_close()

    with training_session(parsed, trial=TrialContext(rehearse=rehearse)) as session:
        rewards = load(session.strategy)
        renderers = [model.reader.renderer for model in rewards.neural.values()]
        ends = {str(end) for each in renderers for end in (*each.ends, each.tokenizer.pad_token) if end}
        starts = {each.start for each in renderers if each.start}
        server = RewardServer(config.server, lambda items: rewards.collect(rewards.submit(items)), tuple(sorted(ends)),
                              tuple(sorted(starts)))
        get_logger().info(f"serving {', '.join(rewards.neural)}: POST {server.url}/get_reward")
        server.run(stop_requested)
        rewards.shutdown()
        get_logger().info(f"stopped after {server.queue.requests} requests with {server.queue.texts} texts")
        clear_stop_request()  # the end of a server is no failure


if __name__ == "__main__":
    main()
