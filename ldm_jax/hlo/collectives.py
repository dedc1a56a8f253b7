"""Exchanges between devices in a compiled program."""

import math
import re
from typing import NamedTuple

from ldm_jax.hlo.program import Program, parse


class Collective(NamedTuple):
  """One exchange between devices, however many instructions it is spread over.

  kind: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute or another of XLA's.
  shapes: the arrays on one device, whole: what an all-gather gives, what a reduce-scatter takes.
  bytes: of these arrays together, unpadded, for one run.
  group_size: devices that exchange with each other.
  runs: how often a step does it; more than 1 inside a loop.
  """

  kind: str
  shapes: tuple[str, ...]
  bytes: int
  group_size: int
  runs: int

  @property
  def received_bytes(self) -> int:
    """What a device must at least receive for it in a step.

    (n − 1)/n of the bytes in a group of n, twice that for an all-reduce, all of them for a permute.
    """
    share = 1 - 1 / self.group_size
    factors = {"all-reduce": 2 * share, "collective-permute": 1, "collective-broadcast": 1}
    return round(factors.get(self.kind, share) * self.bytes * self.runs)


_KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)


def collectives(program: Program | str) -> list[Collective]:
  """Every exchange between devices once.

  XLA for TPUs spreads one exchange over several fusions, to hide it behind computation; the pieces
  have a `chain_id` in common (not a channel: all those of a `shard_map` have the same), and some
  may run more often, in a loop while the exchange is on its way.  A reduce-scatter is written as
  an all-reduce inside a fusion `all-reduce-scatter`.
  """
  program = parse(program) if isinstance(program, str) else program
  found = {}
  for name, computation in program.computations.items():
    for instruction in computation.values():
      kind, _, end = instruction.opcode.partition("-start")
      if kind not in _KINDS or end or not program.runs[name]:
        continue
      chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
      key = (kind, chain[1]) if chain else (name, instruction.name)
      if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
      collective = _collective(kind, instruction, computation, program.runs[name])
      if key not in found or collective.runs < found[key].runs:
        found[key] = collective
  return list(found.values())


def _collective(kind, instruction, computation, runs):
  arrays = instruction.arrays
  if instruction.opcode == "reduce-scatter":
    arrays = [array for name in instruction.operands for array in computation[name].arrays]
  elif instruction.opcode in ("all-gather-start", "collective-permute-start"):
    count = len(instruction.operands)  # the result lists the operands first
    arrays = arrays[count : 2 * count]
  size = group_size(instruction.attributes)
  return Collective(kind, tuple(map(str, arrays)), sum(a.bytes for a in arrays), size, runs)


def group_size(attributes: str) -> int:
  """Devices in one of an instruction's replica groups, in any of the ways that XLA writes them."""
  if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
    return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(match[1])
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return len(match[1].split(","))
  if "source_target_pairs" in attributes:
    return 2
  raise ValueError(f"cannot read the groups of an exchange: {attributes[:200]}")
