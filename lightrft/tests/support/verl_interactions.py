"""Interactions of verl, where a release up to 0.7 is, which has them: its own for GSM8K, and one on its base class."""
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction


class Gsm8k(Gsm8kInteraction):
    """verl's own, as it is."""


class Patient(BaseInteraction):
    """Beginning and end are those of the base class."""

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == kwargs["ground_truth"]
        return right, f"No, {len(messages)}.", float(right), {"asked": 1}
