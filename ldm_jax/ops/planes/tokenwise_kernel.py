"""The body of `tokenwise` as a Pallas kernel for TPUs, and the kernel of its gradients."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ldm_jax.ops.planes.blocks import BLOCK_BYTES, LANES, aligned, compiler_params, each
from ldm_jax.ops.planes.tiles import Tiles, apply

_ROWS = 8  # of a register


def forward(tiles: Tiles, *inputs: jax.Array, interpret: bool = False) -> tuple[jax.Array, ...]:
  """The outputs of the body, from inputs [*lead, B, G, T]."""

  def work(refs, at):
    outs = apply(tiles, _load(refs[: len(inputs)], at))
    _store(refs[len(inputs) :], at, outs)

  shape = inputs[0].shape[-3:]
  results = [
    jax.ShapeDtypeStruct((*lead, *shape), dtype)
    for lead, dtype in zip(tiles.out_leads, tiles.out_dtypes, strict=True)
  ]
  return _run(work, inputs, results, "tokenwise", interpret)


def backward(tiles: Tiles, *operands: jax.Array, interpret: bool = False) -> tuple[jax.Array, ...]:
  """The gradients of all inputs, from inputs and the gradients of all outputs."""
  count = len(tiles.leads)

  def work(refs, at):
    given = _load(refs[:count], at)
    _, pull = jax.vjp(functools.partial(apply, tiles), given)
    dtypes = [
      dtype
      for lead, dtype in zip(tiles.out_leads, tiles.out_dtypes, strict=True)
      for _ in range(tiles.count(lead))
    ]
    bars = _load(refs[count : len(operands)], at)
    bars = [bar.astype(dtype) for bar, dtype in zip(bars, dtypes, strict=True)]
    _store(refs[len(operands) :], at, pull(bars)[0])

  results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:count]]
  return _run(work, operands, results, "tokenwise_gradients", interpret)


def _run(work, operands, results, name, interpret):
  """Runs work(refs, (groups, tokens)) for every register's worth of groups and tokens."""
  arrays = (*operands, *results)
  batch, groups, tokens = arrays[0].shape[-3:]
  rows = _ROWS if groups % _ROWS == 0 else groups
  count = sum(_tiles(x) for x in arrays)
  # A tile takes whole registers however few groups it has.
  token_bytes = 2 * sum(_tiles(x) * x.dtype.itemsize for x in arrays) * -(-rows // _ROWS) * _ROWS
  sizes = [n for n in (1024, 512, 256, LANES) if tokens % n == 0] or [min(tokens, LANES)]
  size = next((n for n in sizes if n * token_bytes <= BLOCK_BYTES), sizes[-1])
  # Few tiles are worked on several registers at a time, to have something to do between loads.
  least = min(size, LANES)
  step = next((n for n in (512, 256) if size % n == 0 and n * count <= 4096), least)
  grid = (batch, groups // rows, -(-tokens // size))

  def kernel(*refs):
    each(size // step, lambda t: work(refs, (slice(None), aligned(t, step))))

  def spec(x):
    lead = x.shape[:-3]
    block = (*lead, 1, rows, size)
    return pl.BlockSpec(block, lambda b, g, t: (*(0 for _ in lead), b, g, t))

  moved = sum(x.size * x.dtype.itemsize for x in arrays)
  return pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=[spec(x) for x in operands],
    out_specs=tuple(spec(x) for x in results),
    out_shape=tuple(results),
    compiler_params=compiler_params(grid, 3, block_bytes=size * token_bytes),
    cost_estimate=pl.CostEstimate(flops=moved, bytes_accessed=moved, transcendentals=0),
    name=name,
    interpret=interpret,
  )(*operands)


def _tiles(x):
  return int(np.prod(x.shape[:-3]))


def _load(refs, at):
  tiles = []
  for ref in refs:
    tiles += [ref[*i, 0, *at].astype(jnp.float32) for i in np.ndindex(ref.shape[:-3])]
  return tiles


def _store(refs, at, tiles: Sequence[jax.Array]):
  tiles = list(tiles)
  for ref in refs:
    for i in np.ndindex(ref.shape[:-3]):
      ref[*i, 0, *at] = tiles.pop(0).astype(ref.dtype)
