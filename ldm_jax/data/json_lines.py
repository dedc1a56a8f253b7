"""JSON lines of any length: a line too long for memory is parsed around its long strings."""

import io
import json
import re
import secrets
import tempfile
from collections.abc import Iterator

from ldm_jax.errors import DocumentError, TrainingError

LONGEST_LINE = 2**24  # bytes that are parsed in one go
_LONG_STRING = 2**16  # a string of more bytes is kept outside the line's skeleton
_BLOCK = 2**20
_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The first half of a surrogate pair waits for what follows it.
_WHOLE_ESCAPES = re.compile(
  rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB]).{4}|\\u[dD][89abAB]..(?:\\u.{4}|(?=[^\\]|\\[^u])))*+",
  re.DOTALL,
)


def field_of_line(line: bytes, field: str) -> tuple[str, bool]:
  """The text of one line.

  Args:
    line: a JSON object, UTF-8, with or without its newline.
    field: the key whose value is the text.

  Returns:
    The text, and whether something in the line had to be replaced by U+FFFD.

  Raises:
    DocumentError: if the line is no JSON object with a string in that field.
  """
  try:
    text, repaired = line.decode(), False
  except UnicodeDecodeError:
    text, repaired = line.decode("utf-8", "replace"), True
  value = _field(_parse(text), field)
  return _without_surrogates(value, repaired)


class LongLine:
  """A line longer than `LONGEST_LINE`, read once; its long strings lie in a temporary file."""

  def __init__(self, start: bytes, file: io.IOBase, field: str):
    """Reads to the end of the line.

    Args:
      start: what was read of the line already.
      file: where the rest comes from, by `readline`.
      field: the key whose value is the text.

    Raises:
      DocumentError: if the line is no JSON object with a string in that field; it was read to its
        end all the same.
      TrainingError: if there is no room for the temporary file.
    """
    self.repaired = False
    self._spool = tempfile.TemporaryFile()  # noqa: SIM115 closed with the object
    self._mark = f"long string {secrets.token_hex(16)} "  # what no line has
    self._spans = []
    try:
      value = _field(self._skeleton(start, file), field)
    except BaseException:
      self.close()
      raise
    self._short = None
    if value.startswith(self._mark):
      self._span = self._spans[int(value.removeprefix(self._mark))]
    else:
      self._short, self.repaired = _without_surrogates(value, False)

  def pieces(self) -> Iterator[bytes]:
    """The text as UTF-8, in pieces.

    Raises:
      DocumentError: if it is not a valid JSON string after all.
    """
    if self._short is not None:
      yield self._short.encode()
      return
    start, end = self._span
    self._spool.seek(start)
    rest = b""
    while start < end:
      block = self._spool.read(min(_BLOCK, end - start))
      start += len(block)
      block = rest + block
      cut = len(block) if start == end else _safe_cut(block)
      rest = block[cut:]
      text, repaired = _decode_string(block[:cut])
      self.repaired |= repaired
      yield text.encode()

  def close(self) -> None:
    """Deletes the temporary file."""
    self._spool.close()

  def _skeleton(self, block, file):
    """The parsed line, each long string replaced by the mark and its number."""
    skeleton, size, in_string, begun, broken = [], 0, False, 0, False
    pending = b""
    while True:
      last = block.endswith(b"\n")
      data, position = pending + block, 0
      pending = b""
      while position < len(data):
        if not in_string:
          quote = data.find(b'"', position)
          end = len(data) if quote < 0 else quote + 1
          skeleton.append(data[position:end])
          size += end - position
          position, in_string, begun = end, quote >= 0, self._spool.tell()
          continue
        end = _STRING_END.match(data, position).end()
        if end < len(data) and data[end : end + 1] == b"\\":  # an escape cut by the block's end
          self._write(data[position:end])
          pending, position = data[end:], len(data)
          continue
        self._write(data[position:end])
        position = end
        if position < len(data):
          size += self._close_string(skeleton, begun)
          position, in_string = position + 1, False
      if size > LONGEST_LINE:
        skeleton, size, broken = [], 0, True
      if last:
        break
      block = file.readline(_BLOCK)
      if not block:
        break
    if broken:
      raise DocumentError(f"over {LONGEST_LINE:,} bytes of a line are not in long strings")
    if in_string:
      raise DocumentError("not valid JSON: a string has no end")
    return _parse(b"".join(skeleton).decode("utf-8", "replace"))

  def _write(self, data):
    try:
      self._spool.write(data)
    except OSError as error:
      raise TrainingError(
        f"writing a long line to {tempfile.gettempdir()} failed: {error.strerror}; free space, or "
        "set TMPDIR to another folder, then run the same command again"
      ) from error

  def _close_string(self, skeleton, begun):
    end = self._spool.tell()
    if end - begun > _LONG_STRING:
      text = json.dumps(f"{self._mark}{len(self._spans)}")[1:].encode()
      self._spans.append((begun, end))
    else:
      self._spool.seek(begun)
      text = self._spool.read(end - begun) + b'"'
      self._spool.seek(begun)
      self._spool.truncate()
    skeleton.append(text)
    return len(text)


def _parse(text):
  try:
    return json.loads(text, strict=False)  # bare control characters are text
  except (ValueError, RecursionError) as error:
    raise DocumentError(f"not valid JSON: {str(error)[:200]}") from error


def _field(value, field):
  if not isinstance(value, dict):
    raise DocumentError(f"a JSON {type(value).__name__}, not an object")
  if field not in value:
    raise DocumentError(f"no field {field!r} (it has {', '.join(map(repr, value))[:200]})")
  if not isinstance(value[field], str):
    raise DocumentError(f"field {field!r} is not a string")
  return value[field]


def _decode_string(data):
  """Part of a JSON string, without its quotes."""
  try:
    text, repaired = data.decode(), False
  except UnicodeDecodeError:
    text, repaired = data.decode("utf-8", "replace"), True
  return _without_surrogates(_parse(f'"{text}"'), repaired)


def _without_surrogates(text, repaired):
  r"""Half of a \ud83d\ude00 pair is no character."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return re.sub("[\ud800-\udfff]", "\ufffd", text), True
  return text, repaired


def _safe_cut(block):
  r"""An index before which no UTF-8 character, escape or \u pair is cut."""
  cut = _WHOLE_ESCAPES.match(block).end()
  for index in range(cut - 1, max(cut - 5, -1), -1):
    if block[index] & 0xC0 != 0x80:
      return index if block[index] >= 0xC0 else cut
  return cut
