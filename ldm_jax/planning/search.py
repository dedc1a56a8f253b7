"""The cheapest change of a run that fits a slice which the run itself does not fit.

Changes are tried in the order of what they cost, each on top of the ones before:

1. `train.remat` dots, then full: a block's forward pass is computed again, at most a third more
   FLOPs and no more exchanges;
2. `train.accumulate`, doubled while the batch divides: activations halve, but weights are read,
   and with fsdp gathered, once for each part;
3. `mesh.fsdp` doubled at the cost of `mesh.data`: parameters and optimizer state halve, weights
   have to be gathered for every block; then 1 and 2 again from the settings given;
4. `mesh.tensor` doubled at the cost of `mesh.fsdp`, up to 8: activations are split too, and
   exchanged in every sublayer; then 1 and 2 again.

What cannot fit is not compiled: a mesh whose parameters and optimizer state alone are too large,
and a number of parts that would not do even if it divided all that is temporary.
"""

import math
from collections.abc import Callable, Iterator

from ldm_jax.config import Config, flatten, with_section
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.planning.plans import Plan

_REMAT = ("none", "dots", "full")
_LARGEST_TENSOR = 8


def cheapest_fit(
  first: Plan, evaluate: Callable[[Config], Plan], state_bytes: Callable[[Config], float]
) -> Plan | None:
  """The first plan that fits, in the order above; None if none does.

  Args:
    first: the plan of the run as it is.
    evaluate: makes a plan; may raise `InputError` for sizes that a mesh cannot split, and
      `TrainingError` for what cannot be compiled.
    state_bytes: of a config's parameters and optimizer state on one device; raises likewise.
  """
  for config in _meshes(first):
    try:
      if state_bytes(config) > first.limit_bytes:
        continue
      found = _fit_on_mesh(config, first, evaluate)
    except (InputError, TrainingError):  # this mesh cannot split the model; another may
      continue
    if found is not None:
      return found
  return None


def _fit_on_mesh(config, first, evaluate):
  best = first if config is first.config else evaluate(config)
  if best.fits:
    return best
  for remat in _REMAT[_REMAT.index(config.train.remat) + 1 :]:
    best = evaluate(with_section(config, "train", remat=remat))
    if best.fits:
      return best
  return _fit_in_parts(best, evaluate)


def _fit_in_parts(best, evaluate):
  rows = best.config.data.batch_size // (best.mesh_shape["data"] * best.mesh_shape["fsdp"])
  while not best.fits:
    fixed = best.parameter_bytes + best.optimizer_bytes
    room = best.limit_bytes - fixed
    if room <= 0:
      return None
    least = (best.needed_bytes - fixed) / room
    parts = best.config.train.accumulate * 2 ** max(1, math.ceil(math.log2(least)))
    if rows % parts:
      return None
    best = evaluate(with_section(best.config, "train", accumulate=parts))
  return best


def _meshes(first: Plan) -> Iterator[Config]:
  yield first.config
  sizes = dict(first.mesh_shape)
  while sizes["data"] % 2 == 0:
    sizes = {**sizes, "data": sizes["data"] // 2, "fsdp": sizes["fsdp"] * 2}
    yield with_section(first.config, "mesh", **sizes)
  while sizes["fsdp"] % 2 == 0 and sizes["tensor"] < _LARGEST_TENSOR:
    sizes = {**sizes, "fsdp": sizes["fsdp"] // 2, "tensor": sizes["tensor"] * 2}
    yield with_section(first.config, "mesh", **sizes)


def changed_settings(before: Config, after: Config) -> dict[str, object]:
  """Settings by dotted name in which two configs differ, with the values of the second."""
  old, new = flatten(before), flatten(after)
  return {key: value for key, value in new.items() if value != old[key]}
