"""How planes are cut into the blocks that a kernel holds in a core's own memory (VMEM)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ldm_jax.typing import Dtype

LANES = 128  # of a TPU register

# Bytes of a kernel's blocks, each held twice, so that one is moved while the other is used.  A
# grid step then moves about 6 MiB, in 5 to 8 us, beside which its fixed cost of 0.35 us is small.
BLOCK_BYTES = 12 * 2**20
VMEM_LIMIT = 32 * 2**20  # blocks and what the compiler spills, of the 64 MiB or more since v5e


class Blocks(NamedTuple):
  """Sizes of one block of a plane: `groups` x `rows` of its width and `tokens`.

  groups: of a block.
  rows: of each group; fewer than the group has only where `groups` is 1.
  tokens: lanes of a block.
  grid: (batch, blocks of tokens, blocks of groups, blocks of a group's rows).
  """

  groups: int
  rows: int
  tokens: int
  grid: tuple[int, int, int, int]


def row_unit(dtypes: Sequence[Dtype]) -> int:
  """Rows of a register tile of the narrowest dtype: 8 of float32, 16 of bfloat16."""
  return 32 // min(jnp.dtype(dtype).itemsize for dtype in dtypes)


def divisors(size: int, unit: int) -> list[int]:
  """The divisors of `size` that are multiples of `unit`, and `size`, from the largest."""
  found = [n for n in range(unit, size, unit) if size % n == 0]
  return [size, *reversed(found)]


def plane_blocks(
  shape: tuple[int, int, int], groups: int, dtypes: Sequence[Dtype], coefficients: int
) -> Blocks:
  """Chooses blocks of a kernel over planes.

  Args:
    shape: of a plane, (B, D, T).
    groups: G.
    dtypes: of all planes in and out.
    coefficients: float32 arrays [B, G, T] held beside them, all groups at once.
  """
  batch, width, tokens = shape
  rows = width // groups
  row_bytes = 2 * sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
  sizes = [size for size in (512, 256, 128) if tokens % size == 0] or [min(tokens, LANES)]
  # Whole groups first: (groups of a block, rows of a group).
  shapes = [(n, rows) for n in divisors(groups, 1)]
  shapes += [(1, n) for n in divisors(rows, row_unit(dtypes))[1:]]
  wanted = min(width, 128)  # rows of a block, or else fewer tokens are better
  for size in sizes:
    left = BLOCK_BYTES - 2 * coefficients * -(-groups // 8) * 8 * size * 4
    fitting = [(n, r) for n, r in shapes if n * r * size * row_bytes <= left]
    if fitting and fitting[0][0] * fitting[0][1] >= wanted:
      break
  n, r = fitting[0] if fitting else shapes[-1]
  return Blocks(n, r, size, (batch, -(-tokens // size), groups // n, rows // r))


def plane_spec(blocks: Blocks) -> pl.BlockSpec:
  """The block of a plane [B, D, T]."""
  rows = blocks.grid[3]
  size = (1, blocks.groups * blocks.rows, blocks.tokens)
  return pl.BlockSpec(size, lambda b, t, g, r: (b, g * rows + r, t))


def coefficient_spec(blocks: Blocks, lead: tuple[int, ...], groups: int) -> pl.BlockSpec:
  """The block of coefficients [*lead, B, G, T]: of all groups, so it stays while they pass."""
  size = (*lead, 1, groups, blocks.tokens)
  return pl.BlockSpec(size, lambda b, t, g, r: (*(0 for _ in lead), b, 0, t))


def compiler_params(
  grid: Sequence[int], parallel: int, block_bytes: int = BLOCK_BYTES
) -> pltpu.CompilerParams:
  """Lets cores share the first `parallel` axes of the grid, and room for blocks and spills."""
  kinds = ["parallel"] * parallel + ["arbitrary"] * (len(grid) - parallel)
  limit = max(VMEM_LIMIT, block_bytes + VMEM_LIMIT // 4)
  return pltpu.CompilerParams(dimension_semantics=tuple(kinds), vmem_limit_bytes=limit)


def each(count: int, body: Callable) -> None:
  """Calls body(i) for each i < count: a loop in the program, as its length is compile time."""
  if count == 1:
    body(0)
  else:
    jax.lax.fori_loop(0, count, lambda i, _: body(i), None)


def aligned(index, size: int):
  """A slice of `size` at `index` * `size`, which the compiler is told is aligned."""
  if isinstance(index, int):
    return pl.ds(index * size, size)
  return pl.ds(pl.multiple_of(index * size, size), size)
