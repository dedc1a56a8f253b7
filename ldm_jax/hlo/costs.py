"""What one run of a compiled program costs, counted from its text: products, traffic, padding.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs, and memory on the
chip like the main memory.  Here loops count as often as they run, and only the main memory counts.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ldm_jax.hlo.collectives import collectives
from ldm_jax.hlo.program import HloArray, Instruction, Program, executed

# Instructions that move nothing: names for arrays, control, and the second half of a pair.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast while conditional call after-all "  # noqa: SIM905
  "partition-id replica-id opt-barrier async-start async-update async-done".split()
)
_VIEWS = ("bitcast", "get-tuple-element", "reshape")
_SLICES = ("dynamic-slice", "slice", "gather")


class PaddedArray(NamedTuple):
  """An array in main memory, and how many instructions give one like it."""

  array: HloArray
  count: int

  @property
  def padding(self) -> float:
    """Share of its memory that holds nothing."""
    return 1 - self.array.bytes / self.array.padded_bytes


def product_flops(program: Program) -> int:
  """FLOPs of all matrix products of a step on one device; a multiply-add is two.

  Products inside kernels (`custom-call`) are not seen, see `attention_kernel_flops`.
  """
  return sum(
    program.runs[name] * _product(instruction, computation)
    for name, computation in program.computations.items()
    for instruction in (computation.values() if program.runs[name] else ())
  )


def _dot(instruction, left, right):
  contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
  depth = math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis)
  return depth * math.prod(instruction.arrays[0].shape)


def _convolution(instruction, left, right):
  """Multiply-adds; XLA for TPUs writes every product of matrices as a convolution."""
  names = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes).groups()
  shapes = (left, right, instruction.arrays[0].shape)
  inputs, kernel, outputs = (
    dict(zip(n, s, strict=True)) for n, s in zip(names, shapes, strict=True)
  )
  window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
  window = dict(part.split("=") for part in window[1].split()) if window else {}
  count = outputs["b"] * outputs["f"] * kernel["i"]
  for axis, name in enumerate(sorted(set(names[2]) - {"b", "f"})):
    setting = {key: value.split("x")[axis] for key, value in window.items()}
    count *= _pairs(inputs[name], kernel[name], outputs[name], setting)
  return count


def _pairs(size, kernel, outputs, window):
  """Pairs of an output and a kernel position that meet a real input, along one axis."""
  stride, dilation = int(window.get("stride", 1)), int(window.get("rhs_dilate", 1))
  spread, low = int(window.get("lhs_dilate", 1)), int(window.get("pad", "0_0").split("_")[0])
  last = (size - 1) * spread
  count = 0
  for tap in range(kernel):
    starts = range(tap * dilation - low, tap * dilation - low + outputs * stride, stride)
    if spread == 1 and stride == 1:
      count += max(0, min(starts.stop - 1, last) - max(starts.start, 0) + 1)
    else:
      count += sum(0 <= place <= last and place % spread == 0 for place in starts)
  return count


def kernels(program: Program) -> Counter[str]:
  """Names of the hand-written kernels (Pallas) of a step, and how often each runs."""
  found = Counter()
  for instruction, _, runs in executed(program):
    if is_kernel(instruction):
      found[instruction.name.split(".")[0]] += runs
  return found


def attention_kernel_flops(program: Program) -> int:
  """FLOPs of the products in splash attention kernels, from their shapes: XLA cannot see inside.

  With H·T queries of width C and S keys a product is 2 H T S C FLOPs; the causal mask spares half.
  The forward kernel has two products, q kᵀ and its weights times v.  The backward ones repeat q kᵀ
  and have ∂o vᵀ; then one has ∂q, the other ∂k and ∂v, or a fused one all three.
  """
  names = kernels(program)
  products = {"fwd": 2, "dq": 3, "dkv": 4 if any("_dq_" in name for name in names) else 5}
  total = 0
  for instruction, computation, runs in executed(program):
    which = re.match(r"splash_m[hq]a_(fwd|dq|dkv)_", instruction.name)
    if which and is_kernel(instruction):
      arrays = [array for name in instruction.operands for array in computation[name].arrays]
      q, k = [a for a in arrays if len(a.shape) > 2 and a.dtype in ("bf16", "f32")][:2]
      total += runs * products[which[1]] * math.prod(q.shape) * k.shape[-2]
  return total


def is_kernel(instruction: Instruction) -> bool:
  """Whether an instruction is a hand-written kernel (Pallas)."""
  target = 'custom_call_target="tpu_custom_call"'
  return instruction.opcode == "custom-call" and target in instruction.attributes


def hbm_bytes(program: Program) -> int:
  """Bytes that a step moves between a device's main memory and its cores, padding included.

  Each instruction or fusion reads its operands and writes its results once; slices and updates in
  place count what they touch, a scatter the whole array.  What stays in the on-chip memory costs
  nothing.  Exchanges between devices read a part and write the whole, or the reverse.
  """
  total = 0
  for instruction, computation, runs in executed(program):
    total += runs * instruction_bytes(program, instruction, computation)
  for exchange in collectives(program):
    total += round(exchange.runs * exchange.bytes * (1 + 1 / exchange.group_size))
  return total


def instruction_bytes(
  program: Program, instruction: Instruction, computation: Mapping[str, Instruction]
) -> int:
  """What one run of an instruction of a computation moves, see `hbm_bytes`; exchanges nothing."""
  if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
    return 0
  return _moved(program, instruction, computation)


def instruction_flops(program: Program, instruction: Instruction) -> int:
  """FLOPs of the matrix products inside a fusion, once."""
  called = re.search(r"calls=%?([\w.-]+)", instruction.attributes)
  if instruction.opcode != "fusion" or called is None:
    return 0
  inside = program.computations[called[1]]
  own = sum(_product(one, inside) for one in inside.values())
  return own + sum(instruction_flops(program, one) for one in inside.values())


def _product(instruction, computation):
  """FLOPs of an instruction if it is a matrix product."""
  if instruction.opcode not in ("convolution", "dot"):
    return 0
  shapes = [computation[operand].arrays[0].shape for operand in instruction.operands[:2]]
  count = _convolution if instruction.opcode == "convolution" else _dot
  return 2 * count(instruction, *shapes)


def _is_exchange(instruction):
  return re.match(r"(ragged-)?all-|reduce-scatter|collective-", instruction.opcode) is not None


def _in_memory(arrays):
  return sum(array.padded_bytes for array in arrays if array.space == 0)


def _moved(program, instruction, computation):
  if _is_exchange(instruction) or "AllocateBuffer" in instruction.attributes:
    return 0
  if instruction.opcode == "fusion":
    inside = program.computations[re.search(r"calls=%?([\w.-]+)", instruction.attributes)[1]]
    return _fusion_moved(program, instruction, inside, computation)
  sources = [array for name in instruction.operands for array in computation[name].arrays]
  arrays = instruction.arrays
  if instruction.opcode == "copy-start":  # gives target, source, context
    arrays = arrays[:1]
  elif instruction.opcode == "slice-start":  # source, target, context
    arrays = arrays[1:2]
  if instruction.opcode in (*_SLICES, "slice-start"):
    return arrays[0].padded_bytes * [sources[0].space, arrays[0].space].count(0)
  if instruction.opcode == "dynamic-update-slice":
    return sources[1].padded_bytes * [sources[0].space, sources[1].space].count(0)
  return _in_memory(sources) + _in_memory(arrays)


def _fusion_moved(program, fusion, inside, computation):
  total = 0
  for number, name in enumerate(fusion.operands):
    outer = _in_memory(computation[name].arrays)
    if outer:
      total += min(outer, _read(program, inside, _parameter(inside, number), outer))
  root = next(instruction for instruction in inside.values() if instruction.is_root)
  results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
  arrays = iter(fusion.arrays)
  for result in results:
    mine = [next(arrays) for _ in result.arrays]
    if result.opcode == "parameter" or _is_exchange(result):
      continue  # handed through, or counted as an exchange
    if result.opcode == "dynamic-update-slice":
      update = inside[result.operands[1]].arrays
      total += min(_in_memory(mine), sum(array.padded_bytes for array in update))
    else:
      total += _in_memory(mine)
  return total


def _parameter(inside, number):
  return next(
    instruction
    for instruction in inside.values()
    if instruction.opcode == "parameter" and instruction.attributes.startswith(f"({number})")
  )


def _read(program, inside, instruction: Instruction, whole):
  """Bytes of an operand that the inside of a fusion looks at, at most `whole`."""
  total = 0
  for user in inside.values():
    places = [place for place, name in enumerate(user.operands) if name == instruction.name]
    if not places or _is_exchange(user) or (user.opcode == "tuple" and user.is_root):
      continue
    if user.opcode in _VIEWS:
      total += _read(program, inside, user, whole)
    elif user.opcode in _SLICES and places == [0]:
      total += sum(array.padded_bytes for array in user.arrays)
    elif user.opcode == "dynamic-update-slice" and places == [0]:
      continue
    elif user.opcode == "fusion":
      called = program.computations[re.search(r"calls=%?([\w.-]+)", user.attributes)[1]]
      total += sum(_read(program, called, _parameter(called, p), whole) for p in places)
    else:
      return whole
  return min(total, whole)


def largest_arrays(program: Program, count: int = 5) -> list[PaddedArray]:
  """The arrays that take most of the main memory, one entry for all of the same type and layout."""
  found = Counter()
  for instruction, _, _ in executed(program):
    if instruction.opcode in ("tuple", "get-tuple-element", "bitcast", "while"):
      continue
    for array in instruction.arrays:
      if array.space == 0 and not instruction.opcode.endswith("-done"):
        found[array] += 1
  largest = sorted(found, key=lambda array: (-array.padded_bytes, str(array)))[:count]
  return [PaddedArray(array, found[array]) for array in largest]
