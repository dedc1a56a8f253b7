"""Which form computes the depth memory, and what the choice is made by.

All forms compute the same numbers, rounding apart:

- reference: the equations as they are written, M and P rewritten at every write;
- chunked: writes wait until there are `chunk` of them, see `deferred`; ordinary jnp;
- history: they wait for ever, so nothing of size K · D is ever stored; ordinary jnp;
- state: they wait for the next write only, tokens last, in ordinary jnp: M in K planes, each write
  and the read after it in one pass;
- kernel: chunked, or history where the chunk is large enough, with Pallas kernels for TPUs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ldm_jax.errors import InputError
from ldm_jax.ops.depth_memory.covariance import is_single
from ldm_jax.ops.depth_memory.natural import Natural
from ldm_jax.ops.depth_memory.token_minor import TokenMinor
from ldm_jax.ops.planes import stream_refusal
from ldm_jax.ops.program import program_of
from ldm_jax.typing import Dtype

FORMS = ("auto", "reference", "state", "chunked", "history", "kernel")

# Γ, the product of the forgetting factors of a chunk, and 1 / Γ must be float32 numbers.
_LARGEST_DECAY = 100  # in powers of two
# A larger chunk keeps fewer copies of M from the forward to the backward pass; it may cost this.
_SLACK = 1.1


class Form(NamedTuple):
  """A form that was chosen.

  name: one of `FORMS` but "auto".
  arithmetic: how its sums are done; None for the reference.
  chunk: the most writes it puts off; 0 for the reference.
  """

  name: str
  arithmetic: Any
  chunk: int


def choose_form(
  form: str,
  chunk: int | None,
  x: jax.Array,
  *,
  rule: str,
  groups: int,
  key_dim: int,
  memory_dtype: Dtype,
  writes: int | None,
  smallest_forgetting: float,
) -> Form:
  """The form that is asked for, or the best one.

  "auto" is the kernel in programs for TPUs, where it can run, and otherwise chunked; with the chunk
  that `best_chunk` finds by `step_traffic`, or on a CPU by `step_terms`, which is history where
  nothing is ever folded.  It is the reference where the number of writes is not known, since
  streams then keep their structure from one sublayer to the next, and for the delta rule, which
  only has that.

  Args:
    form: one of `FORMS`.
    chunk: for the forms chunked and kernel; None leaves it to `best_chunk`.
    x: the residual stream [B, T, D], for its sizes, its dtype and the program that it is part of.
    rule: "rls", "delta" or "outer".
    groups: G.
    key_dim: K.
    memory_dtype: of the folded memory.
    writes: in the whole network; None if not known.
    smallest_forgetting: a lower bound of the forgetting factors.

  Raises:
    InputError: for a form that cannot run here or too large a chunk, saying what to change.
  """
  if rule == "delta" and form not in ("auto", "reference"):
    raise InputError(
      f"model.mixer.form = {form} cannot run with model.mixer.rule = delta, whose writes cannot be "
      "put off; set form to auto or reference"
    )
  if form == "reference" or rule == "delta" or (form == "auto" and writes is None):
    return Form("reference", None, 0)
  limit = _limit(smallest_forgetting) if rule == "rls" else None
  settings = {
    "groups": groups,
    "key_dim": key_dim,
    "rule": rule,
    "memory_dtype": jnp.dtype(memory_dtype).name,
  }
  mesh, platform = program_of(x)
  dtypes = (x.dtype, settings["memory_dtype"])
  refusal = stream_refusal(x.shape, groups, dtypes, mesh, platform)
  if form == "kernel" and refusal is not None:
    raise InputError(f"model.mixer.form = kernel cannot run: {refusal}, or set form to auto")
  if form == "history":
    if writes is None:
      raise InputError(
        "form = history must know how many sublayers there are; give the mixer `sublayers`, or set "
        "form to chunked"
      )
    chunk = writes
  elif form == "state":
    chunk = 1
  elif chunk is None:
    cost = step_terms if platform == "cpu" else step_traffic
    chunk = best_chunk(writes, key_dim, limit, cost)
  if limit is not None and chunk > limit:
    raise InputError(
      f"{chunk} writes put off (model.mixer.form = {form}, model.mixer.chunk) are too many for "
      f"model.mixer.min_forgetting = {smallest_forgetting}: their product would leave the range of "
      f"float32; set chunk to at most {limit}"
    )
  if form == "auto":
    history = writes is not None and chunk >= writes
    form = "kernel" if refusal is None else "history" if history else "chunked"
  if form == "kernel":
    return Form(form, TokenMinor(**settings, form="kernel"), chunk)
  if form == "state" or platform != "cpu":
    return Form(form, TokenMinor(**settings, form="plain"), chunk)
  alone, single = mesh.size <= 1, is_single(x.shape)
  arithmetic = Natural(**settings, apart=alone and not single, single=alone and single)
  return Form(form, arithmetic, chunk)


def _limit(smallest_forgetting):
  if smallest_forgetting >= 1:
    return None
  return max(1, math.floor(_LARGEST_DECAY / -math.log2(smallest_forgetting)))


def step_traffic(chunk: int, writes: int, key_dim: int) -> float:
  """Arrays of the residual stream's size that a training step moves for each write and its read.

  Counted as the kernels move them, with the forward pass run twice (remat "full").  Before the
  first fold there is no M to read.

  Args:
    chunk: the most writes put off.
    writes: in the whole network, each followed by one read.
    key_dim: K.
  """
  total = 0
  for size, planes, folds in _chunks(chunk, writes, key_dim):
    for pending in range(1, size + 1):
      forward = planes + pending + 2  # what is summed, x and the result
      products = planes + pending + 1
      value_gradient = (size - pending + 1) + 2
      total += 2 * forward + products + value_gradient
    if planes:
      total += size + 2 * planes  # the gradient of M from what reads said
    if folds:
      total += 2 * (planes + size + key_dim)  # the fold
      total += 2 * (key_dim + planes + size)  # its gradient
  return total / writes


def step_terms(chunk: int, writes: int, key_dim: int) -> float:
  """Terms weight · array of the stream's size that a training step sums for a write and its read.

  What a CPU's time goes by, where caches hide transfers: a read has a term for each plane and each
  pending value, a fold one for each of them and each of the K new planes, and either has two more
  in its gradients.

  Args:
    chunk: the most writes put off.
    writes: in the whole network, each followed by one read.
    key_dim: K.
  """
  total = 0
  for size, planes, folds in _chunks(chunk, writes, key_dim):
    total += size * planes + size * (size + 1) // 2
    if folds:
      total += key_dim * (planes + size)
  return 3 * total / writes


def _chunks(chunk, writes, key_dim):
  """Of each chunk its writes, the memory planes that its reads see, and whether a fold ends it."""
  for start in range(0, writes, chunk):
    yield min(chunk, writes - start), key_dim if start else 0, start + chunk < writes


def best_chunk(
  writes: int | None,
  key_dim: int,
  limit: int | None = None,
  cost: Callable[[int, int, int], float] = step_traffic,
) -> int:
  """The largest chunk whose cost is at most 1.1 times the least there is.

  Args:
    writes: in the whole network; None if not known, and many are assumed.
    key_dim: K.
    limit: the most writes that may be put off; None if there is no limit.
    cost: of a chunk, a number of writes and K.
  """
  writes = 96 if writes is None else writes
  largest = min(writes, 96, limit or 96)
  costs = {chunk: cost(chunk, writes, key_dim) for chunk in range(1, largest + 1)}
  least = min(costs.values())
  return max(chunk for chunk in costs if costs[chunk] <= _SLACK * least)
