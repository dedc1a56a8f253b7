"""What lies on each device: a table of parameters for the start of a run."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax

from ldm_jax.typing import PyTree


class ParameterRow(NamedTuple):
  """Parameters of one role in every block, alike in shape and split.

  name: path with the number of the block as *.
  count: how many there are.
  shape: of one of them, over all devices.
  spec: mesh axes that each axis is split over, such as "fsdp, -"; "-" is not split.
  bytes_per_device: of all of them.
  """

  name: str
  count: int
  shape: tuple[int, ...]
  spec: str
  bytes_per_device: int


def parameter_rows(params: PyTree) -> list[ParameterRow]:
  """The rows of a tree of arrays, or of shapes, with shardings; the largest on a device first."""
  rows = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    key = (re.sub(r"block_\d+", "block_*", name), leaf.shape, _words(leaf.sharding, leaf.ndim))
    rows.setdefault(key, []).append(bytes_per_device(leaf))
  found = [ParameterRow(key[0], len(b), *key[1:], sum(b)) for key, b in rows.items()]
  return sorted(found, key=lambda row: -row.bytes_per_device)


def mesh_words(sizes: Mapping[str, int]) -> str:
  """The axes of a mesh that split something, such as "data 2 x fsdp 4"; "" on one device."""
  return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def bytes_per_device(tree: PyTree) -> int:
  """Bytes that a tree of arrays, or of shapes, with shardings takes on one device."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def sharding_lines(params: PyTree, optimizer_state: PyTree) -> Iterator[str]:
  """The table, and a last line with the sums per device."""
  rows = parameter_rows(params)
  texts = [
    (f"{row.count} x {row.name}" if row.count > 1 else row.name, str(list(row.shape)), row.spec)
    for row in rows
  ]
  widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
  yield "parameters, their shape, what each axis is split over, and MiB on a device:"
  for text, row in zip(texts, rows, strict=True):
    cells = "  ".join(cell.ljust(width) for cell, width in zip(text, widths, strict=True))
    yield f"  {cells}  {row.bytes_per_device / 2**20:10.3f}"
  yield (
    f"on a device: parameters {bytes_per_device(params) / 2**20:,.1f} MiB, optimizer state "
    f"{bytes_per_device(optimizer_state) / 2**20:,.1f} MiB"
  )


def _words(sharding, rank):
  entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
  axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
  split = [[axis for axis in some if sharding.mesh.shape[axis] > 1] for some in axes]
  return ", ".join(" x ".join(some) or "-" for some in split)
