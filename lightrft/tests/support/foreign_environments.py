"""Environments as users of other trainers write them. Those of packages that are not here are left out."""
from contextlib import suppress
from types import SimpleNamespace


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


tools = [double]  # TRL's


class Counter:
    """A class of TRL's ``environment_factory``: its public methods are tools."""

    def reset(self, difficulty: int = 0, **row) -> str:
        """Begin."""
        self.count, self.difficulty = 0, difficulty
        return f"difficulty {difficulty}"

    def increment(self, step: int) -> int:
        """Count.

        Args:
            step: How far.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        """Say how far it came."""
        return float(self.count)


class AgentInstance:
    """An agent of OpenRLHF, whose base class is ``openrlhf.utils.agent.AgentInstanceBase``."""

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"] + "Think of 3 or 4.\n"}

    async def step(self, states, **kwargs):
        done = states["label"] in states["action_text"]
        return {"rewards": 1.0 if done else 0.0, "environment_feedback": "" if done else "\nagain\n", "done": done,
                "extra_logs": {"tries": 1}}  # yapf: disable


class Text:
    """An environment of SkyRL-Gym."""

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, text):
        return {"observations": [{"role": "user", "content": f"not {text}"}], "reward": 0.5, "done": text == "3",
                "metadata": {"n": 1, "word": "x"}}  # yapf: disable


class VerlTool:
    """A tool of verl, whose base class is ``verl.tools.base_tool.BaseTool``."""

    def __init__(self, config: dict, tool_schema):
        self.config, self.answers, self.released = config, {}, []
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema["function"]["name"]

    def get_openai_tool_schema(self):
        properties = {"answer": {"type": "string", "description": "The answer."}}
        return {"type": "function", "function": {"name": "check", "description": "Check an answer.", "parameters": {
            "type": "object", "properties": properties, "required": ["answer"]}}}  # yapf: disable

    async def create(self, instance_id=None, **kwargs):
        self.answers[instance_id] = kwargs["create_kwargs"]["ground_truth"]
        return instance_id, SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.answers[instance_id]
        return SimpleNamespace(text=f"right: {right}"), 0.25 * right, {"checked": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0 if self.answers[instance_id] else 0.0

    async def release(self, instance_id, **kwargs):
        self.answers.pop(instance_id)


class VerlInteraction:
    """An interaction of verl 0.5, whose base class is ``verl.interactions.base.BaseInteraction``."""

    def __init__(self, config: dict):
        self.truths = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truths[instance_id]
        return right, "Good." if right else f"Wrong, after {len(messages)} messages.", float(right), {"asked": 1}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.0

    async def finalize_interaction(self, instance_id, **kwargs):
        self.truths.pop(instance_id)


class SwiftEnv:
    """A Gym of ms-swift, whose base class is ``swift.plugin.env.Env``."""

    def __init__(self, env_config):
        self.start = env_config["start"]

    async def reset(self, config):
        return f"{len(config.messages)} message, {config.data_dict['reference']}", {}, "Play."

    async def step(self, action):
        return {"messages": len(action)}, 0.5, action[-1]["content"] == self.start, {"n": 2}

    async def close(self):
        """End."""


class RllmEnv:
    """An environment of rLLM, whose base class is ``rllm.environments.base.base_env.BaseEnv``."""

    def __init__(self, answer):
        self.answer = answer

    @staticmethod
    def from_dict(info):
        return RllmEnv(info["reference"])

    def reset(self, task=None):
        return {"question": "sum"}, {}

    def step(self, action):
        return "again", float(action == self.answer), action == self.answer, {}


with suppress(ImportError):
    import gymnasium

    class Lake(gymnasium.Wrapper):
        """FrozenLake of gymnasium, with words for its actions."""

        def __init__(self, **options):
            super().__init__(gymnasium.make("FrozenLake-v1", render_mode="ansi", is_slippery=False, **options))

        def act(self, text):
            moves = ["left", "down", "right", "up"]
            return moves.index(text.strip()) if text.strip() in moves else None

    class Pond(Lake):
        """A lake of four fields, with a hole."""

        def __init__(self):
            super().__init__(desc=["SF", "HG"])


with suppress(ImportError):
    import textarena

    class Guess(textarena.Wrapper):
        """GuessTheNumber of textarena."""

        def __init__(self):
            super().__init__(textarena.make("GuessTheNumber-v0"))


with suppress(ImportError):
    from skyrl_gym.envs.gsm8k.env import GSM8kEnv
    from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
    from skyrl_gym.envs.rlm.env import BaseRLMEnv
    from skyrl_gym.envs.search.env import SearchEnv

    class Problem(GSM8kEnv):
        """GSM8K of SkyRL-Gym."""

    class Problems(GSM8kMultiTurnEnv):
        """GSM8K of SkyRL-Gym in several turns."""

    class Search(SearchEnv):
        """Search of SkyRL-Gym, whose constructor takes a configuration."""

    class Repl(BaseRLMEnv):
        """An agent of SkyRL-Gym that runs Python, and whose instruction is shown for one turn alone."""
