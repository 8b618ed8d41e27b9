"""Checks of the options of rewards: parts, files, servers and the judge."""
import re
from collections.abc import Iterable, Iterator

from lightrft.config.inference_schema import ScoreConfig
from lightrft.config.options import show
from lightrft.config.schema import Config, RewardConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.preflight.cost import known_kinds
from lightrft.preflight.paths import file, models, program
from lightrft.rewards.spec import add_recipe, parse_models, RewardRecipe
from lightrft.utils.errors import did_you_mean, UserError


def reward_problems(c: Config) -> Iterator[str]:
    """Yield every problem of the reward models with the options of the rewards."""
    paths = {*parse_models(c.reward.reward_pretrain).values()}
    if paths and c.rollout.env_images:
        yield (f"--env_images {c.rollout.env_images}: the reward model {', '.join(sorted(paths))} reads no pictures of "
               "an environment; drop --reward_pretrain or --env_images, or score with --reward and your own file")
    kinds = known_kinds(paths)
    if paths and len(kinds) == len(paths):  # else those on the hub are checked when they are loaded
        from lightrft.rewards.reward_models import model_problems
        yield from model_problems(c.reward, kinds)


def played_rewards(c: Config) -> Iterator[str]:
    """Yield that an environment is missing whose rewards are asked for."""
    recipes = [part for recipe in c.reward.reward_recipe for part in recipe.partition(":")[2].split("+")]
    if c.rollout.environment is None and "environment" in (part.partition("=")[0].strip()
                                                           for part in (*c.reward.reward, *recipes)):
        yield "--reward environment: needs --environment FILE, whose turns have the rewards"


def written_rewards(r: RewardConfig) -> Iterator[str]:
    """Yield the problems of the options as they are written, except those of paths."""
    for url in r.remote_rm_url:
        yield from _url("remote_rm_url", url)
    for part in r.reward:
        yield from _part(part)
    recipes: dict[str, RewardRecipe] = {}
    for recipe in r.reward_recipe:
        try:
            add_recipe(recipe, recipes)
        except UserError as error:
            yield str(error)
    yield from _judge(r)
    yield from _judge_forms(r)


def written_scores(c: ScoreConfig) -> Iterator[str]:
    """Yield the problems of what scores responses as it is written, under the name that it has there."""
    rewards = c.as_reward_config()
    yield from map(of_scores, (*models("reward_pretrain", rewards.reward_pretrain), *written_rewards(rewards)))


def of_scores(problem: str) -> str:
    """Name ``--score`` in place of the options of rewards."""
    return re.sub("--(reward|remote_rm_url|reward_pretrain) ", "--score ", problem)


def served_problems(c: ServeConfig) -> Iterator[str]:
    """Yield the problems of the models of a server, and of their weights."""
    yield from written_rewards(c.as_reward_config())
    known = parse_models(c.model.reward_pretrain)
    for path, kind in known_kinds(known.values()).items():
        if kind.generates:
            yield (
                f"--reward_pretrain {path}: according to its config.json it is a generative model, and this command "
                "serves models with a reward head. A judge of lightrft grm compares the responses to a prompt, which "
                "arrive here in different requests: give it to the run (--reward_pretrain), or serve the model with "
                "vLLM and ask it with --reward judge")
        elif c.model.normalize_reward:
            from lightrft.rewards.reward_models import unscaled
            yield from unscaled(path, kind)
    for entry in c.model.reward:
        name = entry.partition("=")[0]
        if name not in known:
            yield (f"--reward {entry}: a server scores only with its models ({', '.join(known)})"
                   f"{did_you_mean(name, known)}; name one of them")


def _part(part: str) -> Iterator[str]:
    name, _, weight = part.rpartition("=") if "=" in part else (part, "", "1")
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", weight):
        yield f"--reward {part}: the weight after = must be a number, e.g. {name}=1.0"
    yield from program("reward", part)


def _url(name: str, url: str) -> Iterator[str]:
    """Yield the problem of a URL that cannot be one."""
    if not re.match(r"https?://[^/]", url):
        file = url.endswith(".py")
        meant = f"a file of functions belongs to --reward {url}" if file else f"did you mean http://{url}?"
        yield f"--{name} {url}: must start with http:// or https://; {meant}"


def _judge(r: RewardConfig) -> Iterator[str]:
    """Yield problems of the judge: options that it lacks, that have no effect, or that do not parse."""
    chosen = any(part.partition("=")[0].strip() == "judge" for part in r.reward)
    for url in r.judge_url:
        yield from _url("judge_url", url)
        if url.rstrip("/").endswith("/chat/completions"):
            yield f"--judge_url {url}: give the base URL, {url.rstrip('/').removesuffix('/chat/completions')}"
    if r.judge_url and not chosen:
        yield (f"--judge_url {','.join(r.judge_url)}: has no effect without --reward judge; add it, with a weight that "
               "scales its scores to those of other parts, e.g. --reward judge=0.1")
    if not r.reward_pretrain:
        yield from _unread(r, ("judge_template", "judge_score") * (not r.judge_url), "--judge_url or --reward_pretrain")
        yield from _unread(r, ("judge_max_len", ), "--reward_pretrain")
    for name, value in (("judge_url", r.judge_url), ("judge_model", r.judge_model)):
        if chosen and not value:
            yield f"--reward judge: needs --{name}, e.g. --judge_url http://host:8000/v1 --judge_model MODEL"


def _unread(r: RewardConfig, names: Iterable[str], needed: str) -> Iterator[str]:
    """Yield a sentence for each of the options ``names`` that is set, where nothing reads it."""
    for name in names:
        if (value := getattr(r, name)) != getattr(RewardConfig, name):
            yield f"--{name} {show(value)}: has no effect without {needed}; add it, or drop --{name}"


def _judge_forms(r: RewardConfig) -> Iterator[str]:
    try:
        if re.compile(r.judge_score).groups != 1:
            yield f"--judge_score {r.judge_score}: needs exactly one group, around the number, e.g. score: (\\d+)"
    except re.error as error:
        yield f"--judge_score {r.judge_score}: is not a regular expression ({error})"
    if not re.fullmatch(r"[A-Za-z_]\w*", r.judge_key_env):  # the value may be a key: do not show it
        yield "--judge_key_env: expected the name of an environment variable, e.g. OPENAI_API_KEY, not the key itself"
    for entry in r.judge_args:
        if not re.match(r"\w+=", entry):
            yield f"--judge_args {entry}: expected name=value, e.g. max_tokens=4096"
    if r.judge_template:
        yield from file("judge_template", r.judge_template, r.judge_template)
