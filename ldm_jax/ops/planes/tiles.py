"""How the body of `tokenwise` is called: on tiles in numpy object arrays."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ldm_jax.typing import Dtype


class Tiles(NamedTuple):
  """A body and the leading axes of what it takes and returns.

  several: whether it returns a tuple.
  """

  body: Callable
  leads: tuple[tuple[int, ...], ...]
  out_leads: tuple[tuple[int, ...], ...]
  out_dtypes: tuple[Dtype, ...]
  several: bool

  @classmethod
  def of(cls, body: Callable, inputs: Sequence[jax.Array]) -> "Tiles":
    """Finds out what the body returns by calling it on tiles without values."""
    leads = tuple(x.shape[:-3] for x in inputs)
    found = {}

    def call(tiles):
      results, found["several"] = _call(body, leads, tiles)
      found["leads"] = tuple(np.shape(x) if isinstance(x, np.ndarray) else () for x in results)
      return [_flat(x)[0] for x in results]

    # Odd sizes, so that a body that mixes positions or adds axes fails here.
    tile = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    outputs = jax.eval_shape(call, [tile] * sum(map(cls.count, leads)))
    if any(x.shape != tile.shape for x in outputs):
      raise ValueError("body of tokenwise must return tiles of the shape of those that it is given")
    return cls(body, leads, found["leads"], tuple(x.dtype for x in outputs), found["several"])

  @staticmethod
  def count(lead: tuple[int, ...]) -> int:
    """Tiles of an array with these leading axes."""
    return math.prod(lead)


def apply(tiles: Tiles, flat: Sequence[jax.Array]) -> list[jax.Array]:
  """Calls the body on the tiles of all inputs, in order; returns those of all outputs."""
  results, _ = _call(tiles.body, tiles.leads, flat)
  return [tile for result in results for tile in _flat(result)]


def _call(body, leads, flat):
  flat, arguments = list(flat), []
  for lead in leads:
    if not lead:
      arguments.append(flat.pop(0))
      continue
    array = np.empty(lead, object)
    for index in np.ndindex(lead):
      array[index] = flat.pop(0)
    arguments.append(array)
  results = body(*arguments)
  several = isinstance(results, tuple | list)
  return (tuple(results) if several else (results,)), several


def _flat(result):
  return list(result.ravel()) if isinstance(result, np.ndarray) else [result]
