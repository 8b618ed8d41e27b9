"""Process reward models: causal language models that judge every step of a packed solution."""
import torch
from torch import nn, Tensor

from lightrft.config.prm_schema import StepFormat
from lightrft.models.actor_modality import ActorModality
from lightrft.models.packed_model import PackedModel
from lightrft.ops.logprobs import Read, read_logprobs
from lightrft.types import Experience

KEY = "process_reward_model"  # entry of config.json, the fields of StepFormat


class ProcessRewardModel(PackedModel):
    """A causal language model; what it expects after the placeholder of a step is its judgement of the step.

    Args:
        model: as of :class:`~lightrft.models.actor_language.ActorLanguage`.
        form: format of steps.
        classes: ids of the reward tokens; empty: the whole vocabulary.
        chunk_mib: MiB of float32 logits alive at once.
    """

    def __init__(self, model: nn.Module, form: StepFormat, classes: list[int], chunk_mib: int = 256,
                 modality: ActorModality | None = None) -> None:
        super().__init__(model, modality)
        self.form, self.classes, self.chunk_mib = form, classes, chunk_mib
        setattr(self.hf_model.config, KEY, vars(form))

    def forward(self, exp: Experience, read: Read) -> tuple[Tensor, ...]:
        """Return what ``read`` makes of the log-probs [N, K] of the classes at the N placeholders, float32.

        The placeholders are the tokens in the loss of ``exp`` (``exp.actions``). N may be 0; the graph still reaches
        every parameter.
        """
        hidden, head = self.hidden_states(exp, exp.host.actions), self.modality.head(self.hf_model)
        weight, bias = head.weight.to(hidden.dtype), head.bias
        if self.classes:  # so few logits cost nothing in float32; a list as index would wait for the device
            hidden, weight = hidden.float(), torch.stack([weight[i] for i in self.classes]).float()
            bias = None if bias is None else torch.stack([bias[i] for i in self.classes]).float()
        return read_logprobs(hidden * head.scale, weight, read, None, bias, self.chunk_mib, head.soft_cap)
