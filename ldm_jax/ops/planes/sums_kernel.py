"""Weighted sums of planes and their products by group as Pallas kernels for TPUs.

Tokens are lanes and a group's rows sublanes, so a coefficient per group and token is one row that
the load broadcasts over sublanes: it costs a load for the many rows it multiplies.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ldm_jax.ops.planes.blocks import (
  LANES,
  aligned,
  coefficient_spec,
  compiler_params,
  divisors,
  each,
  plane_blocks,
  plane_spec,
  row_unit,
)
from ldm_jax.typing import Dtype

# Sums that are held in registers at a time; a core has 64 registers of 8 x 128.
_REGISTERS = 32
_OUTPUTS = 8
_ROWS = 128


def weighted_sums(
  planes: Sequence[jax.Array],
  weights_OPBGT: jax.Array,
  base: Sequence[jax.Array | None],
  dtypes: Sequence[Dtype],
  *,
  transposed: bool = False,
  interpret: bool = False,
) -> tuple[jax.Array, ...]:
  """As `plain.weighted_sums`, each plane being read once."""
  shape, groups = planes[0].shape, weights_OPBGT.shape[3]
  bases = [x for x in base if x is not None]
  every = [*(x.dtype for x in (*planes, *bases)), *dtypes]
  blocks = plane_blocks(shape, groups, every, len(planes) * len(dtypes))
  spec = plane_spec(blocks)
  kernel = functools.partial(
    _sums_kernel,
    len(planes),
    tuple(x is not None for x in base),
    blocks,
    row_unit(every),
    transposed,
  )
  operands = (weights_OPBGT, *planes, *bases)
  size = planes[0].size
  return pl.pallas_call(
    kernel,
    grid=blocks.grid,
    in_specs=[coefficient_spec(blocks, weights_OPBGT.shape[:2], groups)]
    + [spec] * (len(operands) - 1),
    out_specs=tuple([spec] * len(dtypes)),
    out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes),
    compiler_params=compiler_params(blocks.grid, 4),
    cost_estimate=pl.CostEstimate(
      flops=2 * len(planes) * len(dtypes) * size,
      bytes_accessed=size * sum(jnp.dtype(d).itemsize for d in every) + weights_OPBGT.size * 4,
      transcendentals=0,
    ),
    name=f"weighted_sums_{len(dtypes)}x{len(planes)}",
    interpret=interpret,
  )(*operands)


def _sums_kernel(count, based, blocks, unit, transposed, weights, *refs):
  planes, refs = refs[:count], list(refs[count:])
  bases = [refs.pop(0) if has else None for has in based]
  outs = refs
  held = min(len(outs), _OUTPUTS)
  rows = _chunk(blocks.rows, unit, _REGISTERS * 8 // held)
  lanes = min(blocks.tokens, LANES)
  first = pl.program_id(2) * blocks.groups

  def chunk(g, strip, r):
    at = (0, aligned(g * (blocks.rows // rows) + r, rows), pl.ds(strip, lanes))
    for start in range(0, len(outs), held):
      these = range(start, min(start + held, len(outs)))
      sums = [None if bases[o] is None else bases[o][at].astype(jnp.float32) for o in these]
      for p, plane in enumerate(planes):
        x = plane[at].astype(jnp.float32)
        for i, o in enumerate(these):
          pair = (p, o) if transposed else (o, p)
          # A row is loaded whole, as a load of one row is not to start at any lane.
          row = weights[*pair, 0, pl.ds(first + g, 1), :]
          term = row[:, strip : strip + lanes] * x
          sums[i] = term if sums[i] is None else sums[i] + term
      for i, o in enumerate(these):
        outs[o][at] = sums[i].astype(outs[o].dtype)

  def group(g):
    for strip in range(0, blocks.tokens, lanes):
      each(blocks.rows // rows, functools.partial(chunk, g, strip))

  each(blocks.groups, group)


def group_products(
  left: Sequence[jax.Array],
  right: Sequence[jax.Array],
  groups: int,
  *,
  interpret: bool = False,
) -> jax.Array:
  """As `plain.group_products`, each plane being read once."""
  batch, _, tokens = shape = left[0].shape
  operands = (*left, *right)
  dtypes = [x.dtype for x in operands]
  blocks = plane_blocks(shape, groups, dtypes, len(left) * len(right))
  lead = (len(left), len(right))
  result = (*lead, batch, groups, tokens)
  pairs, size = len(left) * len(right), left[0].size
  return pl.pallas_call(
    functools.partial(_products_kernel, *lead, blocks, row_unit(dtypes)),
    grid=blocks.grid,
    in_specs=[plane_spec(blocks)] * len(operands),
    out_specs=coefficient_spec(blocks, lead, groups),
    out_shape=jax.ShapeDtypeStruct(result, jnp.float32),
    compiler_params=compiler_params(blocks.grid, 2),
    cost_estimate=pl.CostEstimate(
      flops=2 * pairs * size,
      bytes_accessed=size * sum(d.itemsize for d in dtypes) + pairs * size // shape[1] * groups * 4,
      transcendentals=0,
    ),
    name=f"group_products_{len(left)}x{len(right)}",
    interpret=interpret,
  )(*operands)


def _products_kernel(outputs, count, blocks, unit, *refs):
  left, right, prod = refs[:outputs], refs[outputs : outputs + count], refs[-1]
  rows = _chunk(blocks.rows, unit, 32)
  lanes = min(blocks.tokens, LANES)
  strips = range(0, blocks.tokens, lanes)
  first = pl.program_id(2) * blocks.groups
  held_left = min(outputs, 8)
  held_right = max(1, _REGISTERS // held_left)

  def pairs(g, strip, lefts, rights):
    """Products of some pairs, each held as one register whose 8 rows are summed at the end."""
    lane = pl.ds(strip, lanes)

    def add(r, sums):
      at = (0, aligned(g * (blocks.rows // rows) + r, rows), lane)
      xs = [left[o][at].astype(jnp.float32) for o in lefts]
      new = []
      for p in rights:
        y = right[p][at].astype(jnp.float32)
        new += [_fold(x * y) for x in xs]
      return [a + b for a, b in zip(sums, new, strict=True)]

    size = (8 if rows % 8 == 0 else rows, lanes)
    sums = [jnp.zeros(size, jnp.float32)] * (len(lefts) * len(rights))
    sums = jax.lax.fori_loop(0, blocks.rows // rows, add, sums)
    return [jnp.sum(x, 0, keepdims=True) for x in sums]

  def group(g):
    for o in range(0, outputs, held_left):
      for p in range(0, count, held_right):
        lefts = range(o, min(o + held_left, outputs))
        rights = range(p, min(p + held_right, count))
        totals = [pairs(g, strip, lefts, rights) for strip in strips]
        # Stored whole, for the same reason.
        for (q, i), parts in zip(
          itertools.product(rights, lefts), zip(*totals, strict=True), strict=True
        ):
          at = (i, q, 0, pl.ds(first + g, 1), slice(None))
          total = jnp.concatenate(parts, 1)
          if blocks.grid[3] > 1:
            total += jnp.where(pl.program_id(3) == 0, 0.0, prod[at])
          prod[at] = total

  each(blocks.groups, group)


def _fold(x):
  """Sums rows 8 apart: whole registers, no movement inside one."""
  if x.shape[0] % 8:
    return x
  parts = [x[i : i + 8] for i in range(0, x.shape[0], 8)]
  while len(parts) > 1:
    parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
  return parts[0]


def _chunk(rows, unit, limit):
  """Rows of a group that are worked on at a time; a divisor of all of them."""
  sizes = divisors(rows, unit)
  return next((n for n in sizes if n <= min(limit, _ROWS)), sizes[-1])
