"""Stand-in for the engine of a plan, which starts none."""
import torch


class PlannedEngine:
    """An engine without a process, memory or weights; it generates nothing."""
    weight_version = 0

    def shared_storage(self) -> set[int]:
        """Return nothing: it holds no weights."""
        return set()

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Return nothing, likewise."""
        return {}

    def sleep(self) -> None:
        """Free nothing."""

    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def shutdown(self) -> None:
        """Release nothing."""
