"""Follows the scalar part of a kernel's schedule: how often every bundle runs, what is transferred.

A core's scalar unit counts loops, takes branches and starts transfers.  Little of it has to be
followed for that: what branches and transfers depend on.  Everything else, vectors above all, is
unknown, and so is what the kernel loads from memory.  A branch forward on something unknown is
taken as not skipping anything, and what lies in between is counted apart.  A branch back on
something unknown is an error, as the number of rounds of that loop cannot be told.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ldm_jax.hlo.bundles import Operation, Schedule

BRANCH_SLOTS = 4  # bundles after a branch that run either way
_GRANULE = 32  # bytes
_MOST_BLOCKS = 20_000_000  # a minute
_WORD = 2**32


class Counts(NamedTuple):
  """What one core does in one run of a kernel.

  bundles: how often each bundle runs for certain.
  conditional: how often each one runs at most on top of that, on conditions on data.
  bytes_read: from main memory, by transfers that the kernel starts for certain.
  bytes_written: to main memory.
  conditional_read, conditional_written: at most on top of that.
  """

  bundles: Sequence[int]
  conditional: Sequence[int]
  bytes_read: int
  bytes_written: int
  conditional_read: int
  conditional_written: int


def follow(schedule: Schedule, core: int = 0) -> Counts:
  """Runs the scalar part of a schedule on one core.

  Args:
    schedule: of the kernel.
    core: which of a chip's TensorCores; kernels with parallel grid axes are split between them.

  Raises:
    ValueError: if the rounds of a loop cannot be told, or the text has an operation that moves the
      flow of control or main memory in a way that is not known here.
  """
  return _Run(schedule, core).counts()


def _signed(value):
  return value - _WORD if value >= _WORD // 2 else value


def _known(function):
  """Unknown if any operand is."""
  return lambda *values: None if None in values else function(*values)


def _arithmetic(function):
  return _known(lambda *values: int(function(*values)) % _WORD)


def _and(a, b):
  return False if a is False or b is False else None if None in (a, b) else True


def _not(a):
  return None if a is None else not a


def _select(condition, a, b):
  return (a if a == b else None) if condition is None else a if condition else b


def _compare(function):
  return {
    "s32": _known(lambda a, b: function(_signed(a), _signed(b))),
    "u32": _known(function),
  }


_COMPARISONS = {
  "eq": lambda a, b: a == b,
  "ne": lambda a, b: a != b,
  "lt": lambda a, b: a < b,
  "le": lambda a, b: a <= b,
  "gt": lambda a, b: a > b,
  "ge": lambda a, b: a >= b,
}
_FUNCTIONS = {
  "smov": lambda a: a,
  "pmov": lambda a: a,
  "sadd.s32": _arithmetic(lambda a, b: a + b),
  "ssub.s32": _arithmetic(lambda a, b: a - b),
  "smul.u32": _arithmetic(lambda a, b: a * b),
  "sshll.u32": _arithmetic(lambda a, b: a << b if b < 32 else 0),
  "sshrl.u32": _arithmetic(lambda a, b: a >> b),
  "sshra.s32": _arithmetic(lambda a, b: _signed(a) >> b),
  "sand.u32": _arithmetic(lambda a, b: a & b),
  "sor.u32": _arithmetic(lambda a, b: a | b),
  "sxor.u32": _arithmetic(lambda a, b: a ^ b),
  "smin.u32": _arithmetic(min),
  "smax.u32": _arithmetic(max),
  "por": lambda a, b: _not(_and(_not(a), _not(b))),
  "pand": _and,
  "pnand": lambda a, b: _not(_and(a, b)),
  "pneg": _not,
  "pxor": _known(lambda a, b: a != b),
  "scalar_select": _select,
  **{
    f"scmp.{name}.{kind}.totalorder": compared
    for name, function in _COMPARISONS.items()
    for kind, compared in _compare(function).items()
  },
}


class _Run:
  """One run: values by name, small memory by address, blocks of bundles without a way in or out."""

  def __init__(self, schedule, core):
    self._schedule, self._core = schedule, core
    self._alias = _phis(schedule)
    self._values, self._memory = {}, {}
    self._moved, self._spaces = Counter(), _spaces(schedule)
    needed = self._needed()
    self._steps = [
      [self._step(operation) for operation in bundle if id(operation) in needed]
      for bundle in schedule.bundles
    ]
    self._blocks = _blocks(schedule)

  def counts(self) -> Counts:
    runs = {True: Counter(), False: Counter()}
    start, unsure_until = 0, 0
    for _ in range(_MOST_BLOCKS):
      end, branch = self._blocks[start]
      if sure := start >= unsure_until:
        unsure_until = 0
      runs[sure][start] += 1
      taken = False
      for number in range(start, end):
        if steps := self._steps[number]:
          self._bundle(steps, sure)
        if branch and number == branch[0]:
          taken = self._condition(branch[1])
      following = end
      if branch and taken is not False:
        target = self._schedule.regions[branch[1].attributes["region"]]
        if taken:
          following = target
        elif target <= start:
          raise ValueError(f"cannot tell how often the loop at bundle {target:#x} runs")
        else:
          unsure_until = max(unsure_until, target)
      if following == len(self._schedule.bundles):
        break
      start = following
    else:
      raise ValueError(f"the schedule does not end within {_MOST_BLOCKS:,} branches")
    return Counts(
      self._per_bundle(runs[True]),
      self._per_bundle(runs[False]),
      self._moved["read", True],
      self._moved["written", True],
      self._moved["read", False],
      self._moved["written", False],
    )

  def _per_bundle(self, runs):
    counts = [0] * len(self._schedule.bundles)
    for start, (end, _) in self._blocks.items():
      counts[start:end] = [runs[start]] * (end - start)
    return counts

  def _bundle(self, steps, sure):
    """All operations of a bundle read what was there before it."""
    changes = [(name, step(sure)) for name, step in steps]
    for name, value in changes:
      if name is not None and value is not _SAME:
        self._values[name] = value

  def _step(self, operation: Operation):
    """The name that an operation sets, and the function that gives its value."""
    name = operation.target and self._alias.get(operation.target, operation.target)
    if operation.opcode.startswith("dma."):
      return None, lambda sure: self._transfer(operation, sure)
    if operation.opcode == "sst":
      return None, lambda sure: self._store(operation)
    if operation.opcode == "sld":
      return self._conditional(operation, name, lambda: self._load(operation))
    function = _FUNCTIONS.get(operation.opcode)
    if function is None:
      return name, lambda sure: None
    getters = [self._getter(operand) for operand in operation.operands]
    return self._conditional(operation, name, lambda: function(*[get() for get in getters]))

  def _conditional(self, operation, name, compute):
    if operation.predicate is None:
      return name, lambda sure: compute()
    condition = self._getter(operation.predicate)
    if operation.otherwise is None:
      otherwise = self._getter(name)
    else:
      otherwise = self._getter(operation.otherwise)
    return name, lambda sure: _select(condition(), compute(), otherwise())

  def _getter(self, operand):
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", operand):
      value = int(operand, 0) % _WORD
      return lambda: value
    if operand.startswith("!"):
      inner = self._getter(operand[1:])
      return lambda: _not(inner())
    if operand in ("true", "false"):
      return lambda: operand == "true"
    name, values = self._alias.get(operand, operand), self._values
    return lambda: values.get(name)

  def _condition(self, operation):
    return True if operation.predicate is None else self._getter(operation.predicate)()

  def _address(self, operand):
    """A place in scalar memory, None if it is not known."""
    match = re.fullmatch(r"\[smem:\[(#\w+)(?: \+ ([^\]]+))?\]\]", operand)
    if match is None:
      return None
    offset = self._getter(match[2].replace("$", ""))() if match[2] else 0
    return None if offset is None else (match[1], offset)

  def _load(self, operation):
    if "core_id" in operation.attributes:
      return self._core
    return self._memory.get(self._address(operation.operands[0]))

  def _store(self, operation):
    address = self._address(operation.operands[0])
    taken = self._condition(operation)
    if address is None:
      self._memory.clear()
    elif taken is None:
      self._memory[address] = None
    elif taken:
      self._memory[address] = self._getter(operation.operands[1])()
    return _SAME

  def _transfer(self, operation, sure):
    taken = self._condition(operation)
    if taken is False:
      return _SAME
    size = self._getter(operation.attributes["size_in_granules"])()
    if size is None:
      raise ValueError("cannot tell how much a transfer moves")
    source, target = _ends(operation, self._spaces)
    for end, way in ((source, "read"), (target, "written")):
      if end == "hbm":
        self._moved[way, sure and taken is True] += size * _GRANULE
    return _SAME

  def _needed(self):
    """Ids of the operations that branches and transfers to or from main memory depend on."""
    setters, stores = {}, {}
    wanted, needed = [], set()
    for operation in _operations(self._schedule):
      if operation.opcode == "sst":
        stores.setdefault(_place(operation), []).append(operation)
      elif operation.target and operation.opcode != "sphi":
        name = self._alias.get(operation.target, operation.target)
        setters.setdefault(name, []).append(operation)
      if operation.opcode == "sbr.rel":
        wanted.append(operation.predicate)
      elif operation.opcode.startswith("dma.") and "hbm" in _ends(operation, self._spaces):
        needed.add(id(operation))
        wanted += [operation.predicate, operation.attributes["size_in_granules"]]
    while wanted:
      name = (wanted.pop() or "").lstrip("!")
      for operation in setters.pop(self._alias.get(name, name), ()):
        needed.add(id(operation))
        wanted += [*_names(operation), operation.predicate, operation.otherwise]
        if operation.opcode == "sld":
          for store in stores.pop(_place(operation), ()):
            needed.add(id(store))
            wanted += [*_names(store), store.predicate]
    return needed


_SAME = object()  # an operation that leaves its target as it is


def _operations(schedule):
  return (operation for bundle in schedule.bundles for operation in bundle)


def _names(operation):
  return re.findall(r"\b[sp]\d+\b", " ".join(operation.operands))


def _place(operation):
  """The array in scalar memory that is loaded from or stored to, None if a register says which."""
  match = re.search(r"#\w+", operation.operands[0])
  return match and match[0]


def _spaces(schedule):
  """The memory that each pointer points into, and copies of pointers do."""
  spaces, copies = {}, []
  for operation in _operations(schedule):
    if match := re.match(
      r"(?:int_to_ptr|scalar_lea|inlined_call_operand)\.(\w+)$", operation.opcode
    ):
      spaces[operation.target] = match[1]
    elif operation.opcode in ("smov", "sphi"):
      copies.append(operation)
  for _ in range(3):  # a copy of a copy
    for copy in copies:
      known = [spaces[name] for name in _names(copy) if name in spaces]
      spaces.update(dict.fromkeys([copy.target], known[0]) if known else {})
  return spaces


def _ends(operation, spaces):
  """Where a transfer comes from and goes to."""
  if operation.opcode == "dma.done.wait":
    return None, None
  if match := re.fullmatch(r"dma\.([a-z]+)_to_([a-z]+)", operation.opcode):
    return match.groups()
  ends = [spaces.get(operation.attributes.get(end)) for end in ("src", "dst")]
  return _unreadable(operation) if None in ends else ends


def _unreadable(operation):
  raise ValueError(f"cannot read the operation {operation.opcode}")


def _phis(schedule):
  """One name for all values that meet: they are one register, never used at the same time."""
  parents = {}

  def find(name):
    while parents.get(name, name) != name:
      name = parents[name]
    return name

  for operation in _operations(schedule):
    if operation.opcode == "sphi":
      for operand in operation.operands:
        parents[find(operand)] = find(operation.target)
  return {name: find(name) for name in parents}


def _blocks(schedule):
  """Bundles that always run together: the first, the one after the last, and the branch at the end.

  A branch is its bundle's number and the operation.
  """
  size, branches, starts = len(schedule.bundles), {}, {0}
  for number, bundle in enumerate(schedule.bundles):
    for operation in bundle:
      if operation.opcode == "sbr.rel":
        branches[number] = operation
        starts |= {schedule.regions[operation.attributes["region"]], number + BRANCH_SLOTS + 1}
      elif re.match(r"sbr|scall|sret|shalt$", operation.opcode):
        _unreadable(operation)
  bounds = sorted(start for start in starts if start < size)
  blocks = {}
  for start, end in zip(bounds, [*bounds[1:], size], strict=True):
    inside = [number for number in branches if start <= number < end]
    if len(inside) > 1 or any(number + BRANCH_SLOTS + 1 != end for number in inside):
      raise ValueError(f"cannot read the branches of bundles {start:#x} to {end:#x}")
    blocks[start] = (end, (inside[0], branches[inside[0]]) if inside else None)
  return blocks
