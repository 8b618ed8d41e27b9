"""Stands in for SGLang's kernels, which have no wheel for CPUs: what SGLang imports by name and, for text and pictures,
never calls.

For tests alone: on the PYTHONPATH of their processes, never imported by lightrft.
"""
import torch


def _absent(*args, **kwargs):
    raise NotImplementedError("sgl_kernel is a stand-in for tests without kernels")


assign_draft_cache_locs_contiguous_cpu = assign_extend_cache_locs_cpu = assign_req_to_token_pool_cpu = _absent
build_tree_kernel_efficient_cpu = verify_tree_greedy_cpu = copy_all_layer_kv_cache_cpu = _absent
fill_accept_out_cache_loc_cpu = fill_bonus_tokens_cpu = _absent

_schemas = torch.library.Library("sgl_kernel", "FRAGMENT")  # that models which see look for
for _name in ("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
              "fused_qkvzba_split_reshape_cat_contiguous_cpu"):  # yapf: disable
    _schemas.define(f"{_name}() -> ()")
