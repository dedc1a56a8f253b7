"""Reads a compiled program: XLA's scheduled HLO text, as `jax.stages.Compiled.as_text()` gives it.

A program is a set of computations.  One is the entry; others are called by instructions: fusions,
and bodies of loops, which run many times.  `Program.runs` says how often each one runs.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class HloArray(NamedTuple):
  """One array of a program, as it lies on one device.

  dtype: XLA's name of it, such as "bf16".
  shape: logical sizes.
  order: axes from the fastest varying to the slowest.
  tiles: sizes of the tiles that its fastest axes are cut into, outermost first.
  space: 0 for the main memory (HBM), others are on the chip.
  """

  dtype: str
  shape: tuple[int, ...]
  order: tuple[int, ...]
  tiles: tuple[tuple[int, ...], ...]
  space: int

  @property
  def bytes(self) -> int:
    """Without padding."""
    return math.ceil(math.prod(self.shape) * _item_bytes(self.dtype))

  @property
  def padded_bytes(self) -> int:
    """What it takes, every axis that is cut into tiles rounded up to whole ones."""
    sizes = [self.shape[axis] for axis in reversed(self.order)]
    for tile in self.tiles:
      sizes = [1] * (len(tile) - len(sizes)) + sizes
      inner = sizes[len(sizes) - len(tile) :]
      whole = [-(-size // side) for size, side in zip(inner, tile, strict=True)]
      sizes = [*sizes[: len(sizes) - len(tile)], *whole, *tile]
    return math.ceil(math.prod(sizes) * _item_bytes(self.dtype))

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
  """One line of a computation.

  arrays: the result; several for a tuple, nested tuples laid flat.
  operands: names of instructions of the same computation.
  attributes: what follows the operands, as text.
  """

  name: str
  opcode: str
  arrays: tuple[HloArray, ...]
  operands: tuple[str, ...]
  attributes: str
  is_root: bool


class Program(NamedTuple):
  """A parsed program.

  computations: by name, each its instructions by name.
  runs: how often each computation runs, fused ones included; 0 for those nothing calls.
  fused: names of the computations that are the inside of a fusion or a reduction, whose
    instructions hold no arrays of their own.
  """

  computations: Mapping[str, Mapping[str, Instruction]]
  runs: Mapping[str, int]
  fused: frozenset[str]


_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.-]+)")
_SEVERAL = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")


def parse_arrays(text: str) -> tuple[HloArray, ...]:
  """All arrays of a type such as `(f32[8,4]{1,0:T(8,128)S(1)}, s32[])`."""
  return tuple(_array(*match.groups()) for match in _ARRAY.finditer(text))


def _array(dtype, sizes, layout):
  shape = tuple(int(size.strip("<= ")) for size in sizes.split(",") if size)
  order, _, details = (layout or "").partition(":")
  axes = tuple(map(int, order.split(","))) if order else tuple(reversed(range(len(shape))))
  tiles = re.search(r"T((?:\([\d,]+\))+)", details)
  tiles = re.findall(r"\(([\d,]+)\)", tiles[1]) if tiles else ()
  space = re.search(r"S\((\d+)\)", details)
  cut = tuple(tuple(map(int, tile.split(","))) for tile in tiles)
  return HloArray(dtype, shape, axes, cut, int(space[1]) if space else 0)


def _item_bytes(dtype):
  if dtype in ("token", "opaque"):
    return 0
  bits = re.search(r"\d+", dtype)
  return int(bits[0]) / 8 if bits else 1  # pred


def parse(text: str) -> Program:
  """Parses a whole program."""
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = computations.setdefault(match[2], {})
      entry = match[2] if match[1] else entry
    elif current is not None and (match := _INSTRUCTION.match(line)):
      current[match[2]] = _instruction(match[2], match[3], bool(match[1]))
  if entry is None:
    raise ValueError("the text has no ENTRY computation; it must be that of a compiled program")
  runs, fused = dict.fromkeys(computations, 0), set()
  _count_runs(computations, entry, 1, runs, fused)
  return Program(computations, runs, frozenset(fused))


def _instruction(name, text, is_root):
  end = _closing(text, 0) if text.startswith("(") else text.index(" ")
  kind, rest = text[:end], text[end:].lstrip()
  opcode, _, _ = rest.partition("(")
  close = _closing(rest, len(opcode))
  inside = rest[len(opcode) + 1 : close - 1]
  # A constant's or parameter's parentheses hold its value; names start with %.
  operands = tuple(re.findall(r"%([\w.-]+)", inside))
  attributes = rest[close:] if operands else f"({inside}){rest[close:]}"
  return Instruction(name, opcode, parse_arrays(kind), operands, attributes, is_root)


def _closing(text, start):
  """Position after the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.compile(r"[()]").finditer(text, start):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.end()
  return len(text)


def _count_runs(computations, name, times, runs, fused):
  runs[name] += times
  for instruction in computations[name].values():
    for how, called in _CALLED.findall(instruction.attributes):
      loop = how in ("body", "condition")
      trips = trip_count(computations, instruction, computations[name]) if loop else 1
      if how == "to_apply" or (how == "calls" and instruction.opcode == "fusion"):
        fused.add(called)
      if name in fused:
        fused.add(called)
      _count_runs(computations, called, times * trips, runs, fused)
    for branches in _SEVERAL.findall(instruction.attributes):
      for called in re.findall(r"[\w.-]+", branches):
        _count_runs(computations, called, times, runs, fused)


def executed(
  program: Program,
) -> Iterator[tuple[Instruction, Mapping[str, Instruction], int]]:
  """Instructions that run on their own, not inside a fusion: each with its computation and runs."""
  for name, computation in program.computations.items():
    if program.runs[name] and name not in program.fused:
      for instruction in computation.values():
        yield instruction, computation, program.runs[name]


def trip_count(
  computations: Mapping[str, Mapping[str, Instruction]],
  instruction: Instruction,
  caller: Mapping[str, Instruction],
) -> int:
  """How often a `while` runs its body: XLA's own note, or from its counter.

  A counter is an element of the loop's state that starts at a constant, is compared with one, and
  has one added in the body; by 2 where XLA has put two iterations into one.

  Args:
    computations: of the whole program.
    instruction: the `while`.
    caller: the computation that it stands in.

  Raises:
    ValueError: if the loop has no such counter.
  """
  if known := re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.attributes):
    return int(known[1])
  parts = dict(re.findall(r"(condition|body)=%?([\w.-]+)", instruction.attributes))
  condition, body = (computations[parts[name]] for name in ("condition", "body"))
  try:
    test = _root(condition)
    counter, bound = (condition[name] for name in test.operands)
    place = int(re.search(r"index=(\d+)", counter.attributes)[1])
    start = _constant(caller, caller[instruction.operands[0]].operands[place])
    step = _step(computations, body, _root(body).operands[place])
    if "direction=LT" not in test.attributes or step < 1:
      raise ValueError
    return max(0, -(-(_constant(condition, bound.name) - start) // step))
  except (ValueError, KeyError, IndexError, TypeError) as error:
    raise ValueError(f"cannot tell how often the loop {instruction.name} runs") from error


def _root(computation):
  return next(instruction for instruction in computation.values() if instruction.is_root)


def _constant(computation, name):
  """The value of an integer constant, looked for behind copies of it."""
  instruction = computation[name]
  while instruction.opcode in ("copy", "bitcast", "convert"):
    instruction = computation[instruction.operands[0]]
  if instruction.opcode != "constant":
    raise ValueError
  return int(re.match(r"\((-?\d+)\)", instruction.attributes)[1])


def _step(computations, computation, name):
  """What is added to the counter that `name` gives the next iteration."""
  instruction = computation[name]
  while instruction.opcode in ("copy", "bitcast"):
    instruction = computation[instruction.operands[0]]
  if instruction.opcode == "fusion":
    computation = computations[re.search(r"calls=%?([\w.-]+)", instruction.attributes)[1]]
    instruction = _root(computation)
  if instruction.opcode != "add":
    raise ValueError
  (step,) = (n for n in instruction.operands if computation[n].opcode == "constant")
  return _constant(computation, step)


def estimated_cycles(program: Program | str) -> int:
  """Sum of the compiler's own estimates over a step, loops included; kernels have none."""
  program = parse(program) if isinstance(program, str) else program
  return sum(runs * instruction_cycles(one) for one, _, runs in executed(program))


def instruction_cycles(instruction: Instruction) -> int:
  """The compiler's own estimate of one run of an instruction, 0 if it has none."""
  match = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
  return int(match[1]) if match else 0
