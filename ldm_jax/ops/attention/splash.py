"""Attention by JAX's splash kernel for TPUs: the T x T logits never leave a core.

Blocks above the diagonal are skipped.  Under this project's mesh every device computes its own rows
and heads; where sequences are split, against all keys and values of the sequence, which it gathers.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ldm_jax.sharding import RULES, partition_spec, parts_of
from ldm_jax.typing import TokensBT

LANES = 128  # of a TPU register: the unit of the kernel's blocks

# Names the output and the logsumexp of the kernel, all that its backward pass needs beside q, k and
# v, for checkpoint policies such as `jax.checkpoint_policies.save_only_these_names`.
SPLASH_RESIDUALS = "splash_residuals"

# For a v5e at T = 2,048 and 4,096, blocks of 512 are scheduled in 1.0 and 1.1 times the cycles of
# blocks of 1,024 and compiled in less than half the time; blocks of 256 take 1.6 times the cycles.
_LARGEST_BLOCK = 512


def splash_attention(
  q_BTHC: Float[Array, "B T H C"],
  k_BTJC: Float[Array, "B T J C"],
  v_BTJC: Float[Array, "B T J C"],
  segment_ids_BT: TokensBT,
  mesh: AbstractMesh,
  *,
  interpret: bool = False,
) -> Float[Array, "B T H C"]:
  """The kernel on each device's part of `mesh`; see `attention`, which checks that it can run."""
  if mesh.size == 1 or AxisType.Auto not in mesh.axis_types:
    kernel = _make_kernel(q_BTHC.shape[1], q_BTHC.shape[2], 1, interpret)
    return _rows(kernel, q_BTHC, k_BTJC, v_BTJC, segment_ids_BT, segment_ids_BT)

  shards, head_shards = parts_of(mesh, "sequence"), parts_of(mesh, "heads")

  def local(kernel, q, k, v, segment_ids):
    keys = [k, v, segment_ids]
    if shards > 1:
      keys = [jax.lax.all_gather(x, RULES["sequence"], axis=1, tiled=True) for x in keys]
    return _rows(kernel, q, keys[0], keys[1], segment_ids, keys[2])

  kernel = _make_kernel(q_BTHC.shape[1], q_BTHC.shape[2] // head_shards, shards, interpret)
  # The kernel holds which blocks each block of rows sees; a device takes those of its own rows.
  blocks = PartitionSpec(None, RULES["sequence"])
  blocks = kernel.manual_sharding_spec(NamedSharding(mesh, blocks))
  q_spec = partition_spec(("batch", "sequence", "heads", "head_dim"))
  k_spec = partition_spec(("batch", "sequence", "kv_heads", "head_dim"))
  segment_spec = partition_spec(("batch", "sequence"))
  return jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(blocks, q_spec, k_spec, k_spec, segment_spec),
    out_specs=q_spec,
    check_vma=False,  # the kernel's outputs do not say over which axes they vary
  )(kernel, q_BTHC, k_BTJC, v_BTJC, segment_ids_BT)


def _rows(kernel, q_BTHC, k_BSJC, v_BSJC, row_ids_BT, key_ids_BS):
  """Mixes S values into T rows; the kernel wants heads before positions and takes no scale."""
  scale = 1 / math.sqrt(q_BTHC.shape[-1])
  q_BTHC = (q_BTHC.astype(jnp.float32) * scale).astype(q_BTHC.dtype)
  q_BHTC, k_BJSC, v_BJSC = (jnp.swapaxes(x, 1, 2) for x in (q_BTHC, k_BSJC, v_BSJC))
  ids = splash.SegmentIds(row_ids_BT, key_ids_BS)
  return jnp.swapaxes(jax.vmap(kernel)(q_BHTC, k_BJSC, v_BJSC, ids), 1, 2)


def _make_kernel(length, heads, shards, interpret):
  """The kernel for `heads` heads; its mask is of the whole sequence, split into `shards`."""
  return splash.make_splash_mha(
    splash.MultiHeadMask([splash.CausalMask((length, length))] * heads),
    block_sizes=_block_sizes(length, shards),
    head_shards=1,
    q_seq_shards=shards,
    residual_checkpoint_name=SPLASH_RESIDUALS,
    interpret=interpret,
  )


def _block_sizes(length, shards):
  rows, keys = _block(length // shards), _block(length)
  # Not the fused backward kernel: it stores dq once for each block of keys, in the dtype of q, and
  # their sum costs more than the two matrix products that it saves.
  return splash.BlockSizes(
    block_q=rows,
    block_kv=keys,
    block_q_dkv=rows,
    block_kv_dkv=keys,
    block_q_dq=rows,
    block_kv_dq=keys,
  )


def _block(length):
  """The largest multiple of 128 up to `_LARGEST_BLOCK` that divides `length`."""
  return max(size for size in range(LANES, _LARGEST_BLOCK + 1, LANES) if length % size == 0)
