"""A tool on verl's own base class, with its schema, response and tracing, for where verl and ray are:
``pip install --no-deps --target DIR verl==0.9.0 ray tensordict pyvers orjson``, and DIR on ``PYTHONPATH``."""
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Check(BaseTool):
    """Compares an answer with that of the row, and remembers in what the tools of a response share how often."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.truths = {}

    def get_openai_tool_schema(self):
        properties = {"answer": {"type": "string", "description": "The answer."}}
        parameters = {"type": "object", "properties": properties, "required": ["answer"]}
        return OpenAIFunctionToolSchema(type="function", function={
            "name": "check", "description": "Check an answer.", "parameters": parameters})  # yapf: disable

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.truths[instance_id] = create_kwargs["ground_truth"]
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        agent_data.extra_fields["checked"] = 1 + agent_data.extra_fields.get("checked", 0)
        right = parameters["answer"] == self.truths[instance_id]
        return ToolResponse(text=f"right: {right}"), 0.25 * right, {"checked": 1}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0 if self.truths[instance_id] else 0.0

    async def release(self, instance_id, **kwargs):
        self.truths.pop(instance_id)
