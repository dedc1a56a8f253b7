"""A plan in words: the table that `python -m ldm_jax.plan` prints, and its JSON."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ldm_jax.planning.plans import RESERVE, Plan
from ldm_jax.sharding_report import mesh_words

_SCHEMA = 1
_GIB = 2**30


def heading(plan: Plan) -> Iterator[str]:
  """What was planned, and where its numbers come from."""
  chip, depth = plan.chip, plan.config.model.blocks
  shape = mesh_words(plan.mesh_shape) or "of one device"
  yield (
    f"{plan.config.model.mixer.kind}, {depth} blocks of width {plan.config.model.width}, on "
    f"{plan.topology}: {plan.chips:,} chips, mesh {shape}, "
    f"{plan.config.train.accumulate} parts, remat {plan.config.train.remat}"
  )
  depths = " and ".join(map(str, plan.compiled_blocks))
  scaled = "" if plan.compiled_blocks == (depth,) else f", extrapolated to {depth}"
  yield (
    f"modelled, nothing was run: from the train step compiled with {depths} blocks{scaled}, and "
    f"the data sheet of {chip.name}"
  )
  if chip.devices > 1:
    yield f"a chip is {chip.devices} devices; memory, work and times are those of one device"
  if plan.config.model.mixer.kind == "attnres" and len(plan.compiled_blocks) == 2:
    yield (
      "the reads of attnres grow with depth, so a line through two depths says too little; give "
      "three with --blocks, multiples of a source's blocks, or use --full"
    )
  if plan.cost and plan.cost.kernels:
    yield (
      "FLOPs of the attention kernels are analytic, of other kernels not counted; the compiler "
      "estimates no cycles for them"
    )


def table(plans: Mapping[str, Plan]) -> Iterator[str]:
  """A Markdown table of one or two plans, with the ratio of the first to the second."""
  columns = [dict(_rows(plan)) for plan in plans.values()]
  names = {name: None for column in columns for name in column}
  ratio = len(columns) == 2
  yield f"| per chip and step | {' | '.join(plans)} |" + (" ratio |" if ratio else "")
  yield f"|---|{'---:|' * len(columns)}" + ("---:|" if ratio else "")
  for name in names:
    values = [column.get(name) for column in columns]
    cells = ["n/a" if value is None else f"{value:,.4g}" for value in values]
    if ratio:
      first, second = values
      cells.append(f"{first / second:.2f}" if first is not None and second else "")
    yield f"| {name} | {' | '.join(cells)} |"


def _rows(plan: Plan):
  cost = plan.cost
  yield "parameters, GiB", plan.parameter_bytes / _GIB
  yield "optimizer state, GiB", plan.optimizer_bytes / _GIB
  if cost:
    rest = cost.state_bytes - plan.parameter_bytes - plan.optimizer_bytes
    yield "activations, gradients, other temporaries, GiB", cost.temporary_bytes / _GIB
    yield "program, batch and padding, GiB", (cost.code_bytes + rest) / _GIB
  yield "needed in all, GiB", plan.needed_bytes / _GIB
  yield "may be used, GiB", plan.limit_bytes / _GIB
  if not cost:
    return
  yield "matrix products, TFLOP", cost.flops / 1e12
  yield "moved to and from HBM, GB", cost.hbm_bytes / 1e9
  yield "received from other chips, GB", plan.received_bytes / 1e9
  for what, seconds in plan.seconds.items():
    yield f"least time for {what}, s", seconds
  yield "no more tokens/s than (all chips)", plan.most_tokens_per_second
  yield "compiler's own estimate, million cycles", cost.cycles / 1e6
  for kind, exchanges in sorted(cost.exchanges.items()):
    yield f"{kind}, count", exchanges.count
    yield f"{kind}, GB", exchanges.bytes / 1e9


def array_lines(plan: Plan) -> Iterator[str]:
  """The largest arrays of the deepest program compiled, and what padding takes of them."""
  if plan.cost is None:
    return
  yield f"largest arrays with {plan.compiled_blocks[-1]} blocks (how many, MiB each, padding):"
  for found in plan.cost.arrays:
    size = found.array.padded_bytes / 2**20
    yield f"  {found.array!s:<28} {found.count:5d} {size:10,.1f} {found.padding:7.1%}"


def verdict(plan: Plan) -> str:
  """Whether it fits, with the numbers."""
  shallow = " at least" if plan.cost is None else ""
  needs = f"needs{shallow} {plan.needed_bytes / _GIB:.2f} GiB"
  have = (
    f"{plan.limit_bytes / _GIB:.2f} GiB a step may use on a {plan.chip.name}"
    f"{' device' if plan.chip.devices > 1 else ''} ({plan.usable_bytes / _GIB:.2f} less "
    f"{RESERVE:.0%} in reserve)"
  )
  return f"{'fits' if plan.fits else 'does not fit'}: {needs}, {have}"


def as_arguments(settings: Mapping[str, Any]) -> str:
  """Settings as they are written on a command line."""
  return " ".join(f"--{key} {value}" for key, value in settings.items())


def as_json(plan: Plan) -> dict[str, Any]:
  """A plan as a JSON object.

  Bytes, FLOPs, cycles and seconds are those of one device and one step; "cost" is None if even the
  compiled depths do not fit.
  """
  cost = plan.cost
  return {
    "schema": _SCHEMA,
    "config": dataclasses.asdict(plan.config),
    "topology": plan.topology,
    "chip": plan.chip.name,
    "chips": plan.chips,
    "devices_per_chip": plan.chip.devices,
    "mesh": dict(plan.mesh_shape),
    "compiled_blocks": list(plan.compiled_blocks),
    "fits": plan.fits,
    "needed_bytes": round(plan.needed_bytes),
    "usable_bytes": round(plan.usable_bytes),
    "limit_bytes": round(plan.limit_bytes),
    "parameter_bytes": plan.parameter_bytes,
    "optimizer_bytes": plan.optimizer_bytes,
    "cost": None if cost is None else _cost(cost),
    "seconds": plan.seconds,
    "tokens_per_second": plan.most_tokens_per_second,
  }


def _cost(cost):
  simple = ("temporary_bytes", "state_bytes", "code_bytes", "flops", "hbm_bytes", "cycles")
  return {
    **{name: round(getattr(cost, name)) for name in simple},
    "collectives": {
      kind: {name: round(value) for name, value in exchanges._asdict().items()}
      for kind, exchanges in sorted(cost.exchanges.items())
    },
    "arrays": [
      {
        "array": str(array),
        "count": count,
        "bytes": array.bytes,
        "padded_bytes": array.padded_bytes,
      }
      for array, count in cost.arrays
    ],
    "kernels": {name: round(runs) for name, runs in cost.kernels.items()},
  }
