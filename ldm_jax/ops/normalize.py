"""Norms: L2 that is safe to differentiate at a zero vector, and the factor of RMSNorm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.typing import AnyArray

# Below this length a vector is scaled by 1 / MIN_LENGTH instead of by its own length, so the
# gradient never exceeds 500 (1 / length would be infinite at zero, and its naive gradient NaN).
MIN_LENGTH = 2e-3
_RMS_EPSILON = 1e-6


def l2norm(x: Float[AnyArray, "*batch K"]) -> Float[AnyArray, "*batch K"]:
  """Scales the last axis to length 1: x / max(‖x‖, 0.002).

  A vector longer than 0.002 comes out with length 1; a zero vector stays zero.

  Args:
    x: [..., K], any float dtype.  The sum of squares is taken in at least float32.

  Returns:
    [..., K] in the dtype of `x`.  Gradients are finite everywhere and at most 500 in size.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  squared = jnp.sum(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(jnp.maximum(squared, MIN_LENGTH**2))).astype(x.dtype)


def inverse_rms(x: Float[AnyArray, "..."], axis: int | tuple[int, ...] = -1) -> Float[Array, "..."]:
  """1 / √(mean(x²) + 1e-6) over `axis`, float32: what RMSNorm multiplies by.

  It is one number per token, so it can wait until after a product.
  """
  wide = jnp.asarray(x, jnp.float32)
  return jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axis) + _RMS_EPSILON)


def inverse_rms_of(squares: Float[Array, "..."], count: int) -> Float[Array, "..."]:
  """`inverse_rms` from the sum of the squares of `count` numbers."""
  return jax.lax.rsqrt(squares / count + _RMS_EPSILON)
