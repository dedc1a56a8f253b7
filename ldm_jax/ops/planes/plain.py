"""The operations on planes in ordinary jnp, for any backend: what the kernels are held to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ldm_jax.typing import Dtype


def weighted_sums(
  planes: Sequence[jax.Array],
  weights_OPBGT: jax.Array,
  base: Sequence[jax.Array | None],
  dtypes: Sequence[Dtype],
  *,
  transposed: bool = False,
) -> tuple[jax.Array, ...]:
  """See `ldm_jax.ops.planes.weighted_sums`; one dtype for each output.

  With `transposed` the first two axes of the weights are (planes, outputs).
  """
  groups = weights_OPBGT.shape[3]
  grouped = [_grouped(plane, groups) for plane in planes]
  sums = []
  for o, dtype in enumerate(dtypes):
    total = None if base[o] is None else _grouped(base[o], groups)
    for p, plane in enumerate(grouped):
      weight = weights_OPBGT[(p, o) if transposed else (o, p)][:, :, None]
      total = weight * plane if total is None else total + weight * plane
    sums.append(total.reshape(planes[0].shape).astype(dtype))
  return tuple(sums)


def group_products(left: Sequence[jax.Array], right: Sequence[jax.Array], groups: int) -> jax.Array:
  """See `ldm_jax.ops.planes.group_products`."""
  left = [_grouped(x, groups) for x in left]
  right = [_grouped(x, groups) for x in right]
  return jnp.stack([jnp.stack([jnp.sum(x * y, 2) for y in right]) for x in left])


def _grouped(x_BDT, groups):
  batch, width, tokens = x_BDT.shape
  return x_BDT.reshape(batch, groups, width // groups, tokens).astype(jnp.float32)
