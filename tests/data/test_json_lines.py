"""Long lines give the text that a whole parse gives, and the same refusals."""

import contextlib
import io
import json

import pytest

from ldm_jax.data import json_lines
from ldm_jax.data.json_lines import LongLine, field_of_line
from ldm_jax.errors import DocumentError

TEXT = 'é"\\ 😀\n\x00\t' + "plain " * 9 + "\\" * 7 + '"x' * 30 + "日本" * 20


@pytest.fixture
def small(monkeypatch):
  monkeypatch.setattr(json_lines, "_LONG_STRING", 16)


@pytest.mark.parametrize("block", [*range(1, 40), 97, 1000])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_line_equals_a_whole_parse(small, monkeypatch, block, ascii_only):
  monkeypatch.setattr(json_lines, "_BLOCK", max(block, 12))
  value = {"a": ["q" * 50, {"text": "no"}], "text": TEXT * 3, "k" * 40: 1, "z": "\\"}
  line = json.dumps(value, ensure_ascii=ascii_only).encode() + b"\n"
  file = io.BytesIO(line + b"next")
  start = file.readline(block)
  long = LongLine(start, file, "text")
  assert b"".join(long.pieces()).decode() == value["text"] == field_of_line(line, "text")[0]
  assert not long.repaired
  assert file.read() == b"next"
  long.close()
  file.seek(0)
  short = LongLine(file.readline(block), file, "z")
  assert b"".join(short.pieces()) == b"\\"
  short.close()


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b'{"text": "' + b"x" * 50, "no end"),
    (b'{"text": "' + b"x" * 50 + b'"', "not valid JSON"),
    (b'{"text": ["' + b"x" * 50 + b'"]}', "not a string"),
    (b'{"other": "' + b"x" * 50 + b'"}', "no field 'text'"),
    (b'["' + b"x" * 50 + b'"]', "a JSON list"),
    (b"[" + b"1, " * 50 + b"1]", "not in long strings"),
    (b'{"text": "' + b"x" * 50 + rb'\q"}', "not valid JSON"),
    (b'{"text": "' + b"x" * 50 + rb'\u12"}', "not valid JSON"),
  ],
)
def test_broken_long_lines_are_refused_and_read_to_their_end(small, monkeypatch, line, message):
  monkeypatch.setattr(json_lines, "LONGEST_LINE", 100)
  file = io.BytesIO(line + b"\nnext")
  with (
    pytest.raises(DocumentError, match=message),
    contextlib.closing(LongLine(file.readline(20), file, "text")) as long,
  ):
    list(long.pieces())
  assert file.read() == b"next"


def test_what_is_no_unicode_is_repaired(small):
  for text, wanted in ((rb"\ud83d \ude00", "\ufffd \ufffd"), (b"\xff\xfe", "\ufffd\ufffd")):
    line = b'{"text": "' + b"x" * 50 + text + b'"}\n'
    long = LongLine(line, io.BytesIO(), "text")
    assert b"".join(long.pieces()).decode() == "x" * 50 + wanted
    assert long.repaired
    long.close()
    assert field_of_line(line, "text") == ("x" * 50 + wanted, True)
