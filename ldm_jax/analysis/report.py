"""An analysis as JSON and in words."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ldm_jax.analysis.measure import Analysis
from ldm_jax.analysis.memory import Memory
from ldm_jax.analysis.mixing import Mixing
from ldm_jax.analysis.plots import write_names

_LISTED = 5


def as_json(analysis: Analysis) -> dict[str, Any]:
  """Every number of an analysis under its field's name; arrays are nested lists.

  NaN and infinity, which JSON lacks, are None.
  """
  return _plain(analysis._asdict())


def _plain(value):
  if isinstance(value, Mixing | Memory):
    value = value._asdict()
  if isinstance(value, dict):
    return {name: _plain(part) for name, part in value.items()}
  if isinstance(value, np.ndarray):
    value = value.astype(np.float64).tolist()
  if isinstance(value, list | tuple):
    return [_plain(part) for part in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(analysis: Analysis) -> Iterator[str]:
  """A few lines on what stands out."""
  yield f"loss {analysis.loss:.4f} nats per token"
  largest = np.max(analysis.mixing.read_error)
  yield f"the weights explain what the model reads to {largest:.1e} of its size"
  yield f"the head draws on: {_largest(analysis.mixing.shares[-1], analysis.sources, '{:.0%}')}"
  if analysis.memory is not None:
    yield from _memory_lines(analysis)


def _memory_lines(analysis):
  memory = analysis.memory
  sizes = np.mean(memory.magnitudes, axis=-1)
  if not np.isnan(sizes).all():
    yield f"strongest reads of the memory, mean |w|: {_strongest(analysis, sizes)}"
  seen = ~np.isnan(memory.recall_error[-1, :, 0])
  errors = np.mean(memory.recall_error[-1][seen], axis=-1)
  yield (
    f"recall at the head, relative error: newest write {errors[-1]:.2f}, oldest {errors[0]:.2f}, "
    f"median {np.median(errors):.2f}"
  )
  pairs = np.mean(memory.key_overlap, axis=-1)[np.triu_indices(len(errors), 1)]
  rank = np.mean(memory.key_rank[-1])
  overlap = f"mean |cosine| of two keys {np.mean(pairs):.2f}, " if len(pairs) else ""
  yield f"keys: {overlap}effective rank {rank:.1f} at the head"
  conditions = memory.condition_number[-1]
  if not np.isnan(conditions).all():
    yield (
      f"condition number of P at the head: {np.mean(conditions):.1f} in the mean of the groups, "
      f"{np.max(conditions):.1f} in the worst (group {np.argmax(conditions)})"
    )


def _strongest(analysis, sizes):
  order = np.argsort(np.nan_to_num(sizes, nan=-1.0), axis=None)[::-1][:_LISTED]
  found, names = [divmod(int(place), sizes.shape[1]) for place in order], write_names(analysis)
  return ", ".join(
    f"{analysis.reads[read]} on {names[write]} {sizes[read, write]:.2f}"
    for read, write in found
    if not np.isnan(sizes[read, write])
  )


def _largest(values, names, form):
  order = np.argsort(-np.abs(values))[:_LISTED]
  return ", ".join(f"{names[index]} {form.format(values[index])}" for index in order)
