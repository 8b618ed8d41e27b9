"""Packages that an installation may lack, and the modules that need one of them at their import."""
OPTIONAL = ("deepspeed", "vllm", "sglang", "flash_attn", "liger_kernel", "wandb", "trackio", "torchvision",
            "qwen_vl_utils", "bitsandbytes")
LATE = ("peft", )  # imported where adapters are made
# of CUDA; an option that asks for them needs Triton
KERNELS = ("lightrft.ops.logits_kernels", "lightrft.rollout.hf.attention_kernel")
