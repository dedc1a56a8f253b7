"""Sinkhorn's iteration towards a doubly stochastic matrix (Sinkhorn 1964).

Manifold-constrained hyper-connections (arXiv 2512.24880) mix their streams with the result.  The
matrix exp(logits) has its columns, then its rows, divided by their sums, again and again.  Here
everything stays in the logarithmic domain, where the iterate is

    H = exp(logits + r 1ᵀ + 1 cᵀ)

with one number r_i per row and one c_j per column, so no logit can overflow or lose its gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ldm_jax.typing import AnyArray


def sinkhorn(
  logits: Float[AnyArray, "*batch N N"], iterations: int = 20
) -> Float[Array, "*batch N N"]:
  """Doubly stochastic matrices from logits: `iterations` times columns, then rows.

  Rows sum to 1 to rounding.  Columns do as far as the iteration has converged: of 4 x 4 matrices of
  standard-normal logits, 99.5 % are within 1e-5 after 20 iterations, but next to the identity it is
  slow: around 6 I − 3 with a spread of 0.3 the columns are off by 3e-3 (median).  The gradient is
  that of the iteration itself; the backward pass repeats the iteration, so nothing but the logits
  is kept.

  Args:
    logits: float [..., N, N], finite.
    iterations: at least 1.

  Returns:
    [..., N, N] in float32, or float64 for float64 logits.

  Raises:
    ValueError: if `iterations` is below 1.
  """
  if iterations < 1:
    raise ValueError(f"iterations must be at least 1, got {iterations}")
  logits = jnp.asarray(logits)
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  # The batch last: it is long, N is not.
  leading = jnp.moveaxis(logits, (-2, -1), (0, 1))
  return jnp.moveaxis(sinkhorn_leading(leading, iterations), (0, 1), (-2, -1))


@functools.partial(jax.checkpoint, static_argnums=1)
def sinkhorn_leading(
  logits: Float[Array, "N N *batch"], iterations: int
) -> Float[Array, "N N *batch"]:
  """`sinkhorn` with the matrix axes in front, the layout that vector units want."""

  def columns(row):
    return -jax.nn.logsumexp(logits + row[:, None], axis=0)

  def normalise(row, _):
    return -jax.nn.logsumexp(logits + columns(row)[None], axis=1), None

  row, _ = jax.lax.scan(normalise, jnp.zeros_like(logits[:, 0]), length=iterations - 1)
  return jax.nn.softmax(logits + columns(row)[None], axis=1)
