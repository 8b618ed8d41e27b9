"""Device mesh of the ranks that share one copy of the weights."""
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrft.utils.errors import UserError


def shard_mesh(device_type: str, world_size: int, shard_size: int = 0) -> DeviceMesh:
    """Make a mesh ``("shard",)`` over all ranks, or ``("replicate", "shard")`` when fewer than all share one copy.

    Args:
        device_type: "cuda" or "cpu".
        world_size: number of ranks.
        shard_size: ranks that share one copy; 0 for all. Neighbours share, so a copy stays within a node.

    Raises:
        ValueError: ``shard_size`` does not divide ``world_size``.
    """
    size = shard_size or world_size
    if size < 0 or world_size % size:
        valid = [n for n in range(1, world_size + 1) if world_size % n == 0]
        nearest = min(valid, key=lambda n: abs(n - size))
        raise UserError(f"shard size {size} does not divide the {world_size} ranks; the nearest that does is {nearest} "
                        "(--fsdp_shard_size, --initial_model_shard_size)")
    if size == world_size:
        return init_device_mesh(device_type, (world_size, ), mesh_dim_names=("shard", ))
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
