"""Commands that generate without training: batch inference, evaluation and chat."""
