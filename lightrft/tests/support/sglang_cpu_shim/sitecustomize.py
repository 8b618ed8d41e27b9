"""For tests of SGLang beside a torch for CPUs: torchvision, built for CUDA, looks for two operators when it is
imported. Here they get their schemas just before. And SGLang does without the vLLM of the environment it shares: each
of its processes would import it, for kernels that need a GPU."""
import sys


class _BeforeTorchvision:
    """Finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.torchvision_schemas = self  # they last as long as their library


sys.meta_path.insert(0, _BeforeTorchvision())
sys.modules["vllm"] = None
