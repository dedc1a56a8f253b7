"""Parses the final schedule of a kernel: what a TPU core issues, one bundle of operations a cycle.

libtpu writes it as text (`*final_bundles.txt`, see `hlo.schedule`).  A line is one bundle:

    0x2e   : >> { %v4_v1 = vadd.f32 1.0, %v3_v2  ;;  %170 = sbr.rel (!%p8_p4) target = $region85 }

Values are named twice, once as single assignments and once by register: `%p8_p4`.  Where paths
meet, `sphi` names those that one register holds.  Regions begin where a comment says so,
but for one at the end, which is marked PF.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Operation(NamedTuple):
  """One operation of a bundle.

  target: what it computes, None if nothing that has a name.
  opcode: as in "sadd.s32".
  predicate: the condition under which it takes place, such as "!p12", None if always.
  otherwise: what `target` is if not; None if it is left as it was.
  operands: names, and constants as text.
  attributes: labelled operands, such as `size_in_granules` of a transfer.
  """

  target: str | None
  opcode: str
  predicate: str | None
  otherwise: str | None
  operands: tuple[str, ...]
  attributes: Mapping[str, str]


class Schedule(NamedTuple):
  """Bundles in the order in which they lie, and the number of the first one of each region."""

  bundles: Sequence[Sequence[Operation]]
  regions: Mapping[str, int]


_BUNDLE = re.compile(r"^ *(0|0x[0-9a-f]+) +([A-Z]{2})? *: *>* *\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*|\*/")
_NAME = re.compile(r"(!?)%([a-z]*\d+)(?:_[a-z]+\d+)?")


def parse_schedule(text: str) -> Schedule:
  """Parses a whole `*final_bundles.txt`.

  Raises:
    ValueError: if it holds no bundles, not all of them, or jumps to a place that it does not tell.
  """
  heads = list(_BUNDLE.finditer(text))
  if not heads:
    raise ValueError("the text has no bundles; it must be a final_bundles.txt that libtpu wrote")
  bundles, regions, unnamed = [], {}, []
  for number, head in enumerate(heads):
    if int(head[1], 0) != number:
      raise ValueError(f"the schedule has no bundle {number:#x}")
    end = heads[number + 1].start() if number + 1 < len(heads) else len(text)
    bundle = text[head.end() : end]
    starts = re.findall(r"Start(?:/End empty)? region (\d+)", bundle)
    for region in starts:
      regions.setdefault(region, number)
    if head[2] == "PF" and not starts:
      unnamed.append(number)
    inside = _without_comments(bundle).rpartition("}")[0]
    bundles.append([_operation(part.strip()) for part in inside.split(";;") if part.strip()])
  targets = {operation.attributes.get("region") for bundle in bundles for operation in bundle}
  missing = targets - {None, *regions}
  if missing and (len(missing) > 1 or len(unnamed) != 1):
    raise ValueError(f"cannot tell where the regions {', '.join(sorted(missing))} begin")
  return Schedule(bundles, {**regions, **dict(zip(missing, unnamed, strict=False))})


def _without_comments(text):
  """Drops comments, which nest; keeps labels, as in `/*size_in_granules=*/896`."""
  kept, depth, start = [], 0, 0
  for mark in _COMMENT.finditer(text):
    if mark[0] == "/*":
      if depth == 0:
        kept.append(text[start : mark.start()])
        start = mark.end()
      depth += 1
    else:
      depth -= 1
      if depth == 0:
        inside = text[start : mark.start()]
        kept.append(f"@{inside}" if re.fullmatch(r"\w+=", inside) else "")
        if inside.strip() == "core id":  # the only comment that says what is loaded
          kept.append("@core_id=1")
        start = mark.end()
  return "".join([*kept, text[start:]])


def _operation(text):
  target, rest = re.match(r"(?:%(\S+) = )?(.*)", text, re.DOTALL).groups()
  rest, _, core = rest.partition("@core_id=")
  opcode, _, rest = rest.strip().partition(" ")
  attributes = {key: _short(value) for key, value in re.findall(r"@(\w+)=([^,@]*)", rest)}
  if core:
    attributes["core_id"] = core
  if jump := re.search(r"target = \$region(\d+)", rest):
    attributes["region"] = jump[1]
  rest = re.sub(r"@\w+=|\[thread[^\]]*\]|target = \$region\d+", "", rest)
  predicate, otherwise = None, None
  if condition := re.search(r"\((!?%p[^,()]*)(?:, *([^()]*))?\)", rest):
    predicate, otherwise = _short(condition[1]), condition[2] and _short(condition[2])
    rest = rest[: condition.start()] + "," + rest[condition.end() :]
  rest = rest.replace("]] ", "]],")  # an address and what is stored there
  operands = tuple(_short(part) for part in rest.split(",") if part.strip())
  return Operation(
    target and _short(f"%{target}"), opcode, predicate, otherwise, operands, attributes
  )


def _short(text):
  """Registers dropped: `%s12_s3` is s12."""
  return _NAME.sub(r"\1\2", text.strip())
