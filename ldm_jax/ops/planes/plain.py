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


def thin_product(x_BDT: jax.Array, w_RD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """See `ldm_jax.ops.planes.thin_product`; w has the dtype of x."""
  y_BRT = jnp.einsum("rd,bdt->brt", w_RD, x_BDT, **_exactly(x_BDT.dtype))
  return y_BRT, jnp.sum(jnp.square(x_BDT.astype(jnp.float32)), 1, keepdims=True)


def thin_product_gradients(
  x_BDT: jax.Array,
  w_RD: jax.Array,
  y_bar_BRT: jax.Array,
  squares_bar_B1T: jax.Array,
  incoming_BDT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """See `ldm_jax.ops.planes.thin_product_gradients`; w has the dtype of x."""
  options = _exactly(x_BDT.dtype)
  y_bar_BRT = y_bar_BRT.astype(x_BDT.dtype)
  x_bar = jnp.einsum("rd,brt->bdt", w_RD, y_bar_BRT, **options)
  x_bar += 2 * squares_bar_B1T * x_BDT.astype(jnp.float32)
  if incoming_BDT is not None:
    x_bar += incoming_BDT.astype(jnp.float32)
  w_bar_RD = jnp.einsum("brt,bdt->rd", y_bar_BRT, x_BDT, **options)
  return x_bar.astype(x_BDT.dtype), w_bar_RD


def precision(dtype: Dtype) -> jax.lax.Precision:
  """Of matrix products: one pass where operands are bfloat16, none rounded where float32."""
  exact = jnp.dtype(dtype) == jnp.float32
  return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT


def _exactly(dtype):
  return {"precision": precision(dtype), "preferred_element_type": jnp.float32}
