"""Products of a plane with a matrix of few rows as Pallas kernels for TPUs.

Such a product has so little to compute for each byte of the plane that reading the plane is its
cost.  So whatever else is needed of the same bytes is done in the same pass.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ldm_jax.ops.planes.blocks import (
  BLOCK_BYTES,
  LANES,
  aligned,
  compiler_params,
  divisors,
  each,
  row_unit,
)
from ldm_jax.ops.planes.plain import precision

_CHUNK = 256  # rows of a plane that are multiplied at a time
_GRADIENT_ROWS = 1024
_GRADIENT_CHUNK = 256


def thin_product(
  x_BDT: jax.Array, w_RD: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
  """As `plain.thin_product`, reading x once."""
  batch, width, tokens = x_BDT.shape
  rows = w_RD.shape[0]
  itemsize = x_BDT.dtype.itemsize
  size = _tokens(tokens, 2 * (width * itemsize + rows * 4), 2 * w_RD.size * itemsize)
  grid = (batch, -(-tokens // size))
  chunk = _divisor(width, LANES, _CHUNK)  # of the lanes of w, too

  def kernel(w, x, y, squares):
    y[...] = jnp.zeros_like(y)
    squares[...] = jnp.zeros_like(squares)

    def step(i):
      part = x[0, aligned(i, chunk)]
      y[0] += _dot(w[:, aligned(i, chunk)], part, ((1,), (0,)))
      squares[0] += jnp.sum(jnp.square(part.astype(jnp.float32)), 0, keepdims=True)

    each(width // chunk, step)

  def spec(rows):
    return pl.BlockSpec((1, rows, size), lambda b, t: (b, 0, t))

  return pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=[pl.BlockSpec((rows, width), lambda b, t: (0, 0)), spec(width)],
    out_specs=(spec(rows), spec(1)),
    out_shape=(
      jax.ShapeDtypeStruct((batch, rows, tokens), jnp.float32),
      jax.ShapeDtypeStruct((batch, 1, tokens), jnp.float32),
    ),
    compiler_params=compiler_params(grid, 2),
    cost_estimate=pl.CostEstimate(
      flops=2 * (rows + 1) * x_BDT.size,
      bytes_accessed=x_BDT.size * itemsize + batch * tokens * (rows + 1) * 4,
      transcendentals=0,
    ),
    name=f"thin_product_{rows}",
    interpret=interpret,
  )(w_RD, x_BDT)


def thin_product_gradients(
  x_BDT: jax.Array,
  w_RD: jax.Array,
  y_bar_BRT: jax.Array,
  squares_bar_B1T: jax.Array,
  incoming_BDT: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """As `plain.thin_product_gradients`, reading x once."""
  batch, width, tokens = x_BDT.shape
  rows = w_RD.shape[0]
  planes = [x_BDT] if incoming_BDT is None else [x_BDT, incoming_BDT]
  dtypes = [x.dtype for x in (*planes, x_BDT)]
  # Blocks of the width are the axis that two cores can share, as each has sums of its own.
  d = _divisor(width, row_unit(dtypes), min(_GRADIENT_ROWS, max(width // 2, 1)))
  itemsize = x_BDT.dtype.itemsize
  token_bytes = 2 * (d * sum(t.itemsize for t in dtypes) + rows * itemsize + 32)
  size = _tokens(tokens, token_bytes, 2 * d * rows * (4 + itemsize))
  grid = (width // d, batch, -(-tokens // size))
  ragged = tokens % size != 0

  chunk = _divisor(d, row_unit(dtypes), _GRADIENT_CHUNK)

  def kernel(w, y_bar, squares_bar, *refs):
    x, x_bar, w_bar = refs[0], refs[-2], refs[-1]
    y_block = y_real = y_bar[0]
    if ragged:  # what lies beyond the last token is anything
      lane = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
      real = pl.program_id(2) * size + lane < tokens
      y_real = jnp.where(real, y_block, jnp.zeros_like(y_block))

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
      w_bar[...] = jnp.zeros_like(w_bar)

    def step(i):
      at = aligned(i, chunk)
      x_block = x[0, at]
      total = 2 * squares_bar[0] * x_block.astype(jnp.float32)
      total += _dot(w[at], y_block, ((1,), (0,)))
      if incoming_BDT is not None:
        total += refs[1][0, at].astype(jnp.float32)
      x_bar[0, at] = total.astype(x_bar.dtype)
      x_real = jnp.where(real, x_block, jnp.zeros_like(x_block)) if ragged else x_block
      w_bar[at] += _dot(x_real, y_real, ((1,), (1,)))

    each(d // chunk, step)

  def spec(rows, index):
    return pl.BlockSpec((1, rows, size), index)

  plane = spec(d, lambda i, b, t: (b, i, t))
  matrix = pl.BlockSpec((d, rows), lambda i, b, t: (i, 0))
  x_bar, w_bar_DR = pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=[
      matrix,
      spec(rows, lambda i, b, t: (b, 0, t)),
      spec(1, lambda i, b, t: (b, 0, t)),
      *[plane] * len(planes),
    ],
    out_specs=(plane, matrix),
    out_shape=(
      jax.ShapeDtypeStruct(x_BDT.shape, x_BDT.dtype),
      jax.ShapeDtypeStruct((width, rows), jnp.float32),
    ),
    compiler_params=compiler_params(grid, 1),
    cost_estimate=pl.CostEstimate(
      flops=4 * (rows + 1) * x_BDT.size,
      bytes_accessed=x_BDT.size * sum(t.itemsize for t in dtypes) + y_bar_BRT.size * itemsize,
      transcendentals=0,
    ),
    name=f"thin_product_gradients_{rows}",
    interpret=interpret,
  )(w_RD.T, y_bar_BRT.astype(x_BDT.dtype), squares_bar_B1T, *planes)
  return x_bar, w_bar_DR.T


def _dot(a, b, contracted):
  return jax.lax.dot_general(
    a,
    b,
    (contracted, ((), ())),
    precision=precision(a.dtype),
    preferred_element_type=jnp.float32,
  )


def _tokens(tokens, token_bytes, fixed_bytes):
  """Lanes of a block."""
  sizes = [n for n in (512, 256, LANES) if tokens % n == 0] or [min(tokens, LANES)]
  room = BLOCK_BYTES - fixed_bytes
  return next((n for n in sizes if n * token_bytes <= room), sizes[-1])


def _divisor(size, unit, limit):
  """The largest divisor of `size` that is a multiple of `unit` and at most `limit`, or `size`."""
  return next((n for n in divisors(size, unit)[1:] if n <= limit), size) if size > limit else size
