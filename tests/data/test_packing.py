"""Every token once, documents apart, nothing predicted across a boundary."""

import numpy as np
import pytest

from ldm_jax.data import ByteTokenizer, PackedRows, lay_end_to_end
from ldm_jax.errors import InputError

TOKENIZER = ByteTokenizer()
TEXTS = [b"", b"a", b"hello\x00world", b"0123456789" * 5, b"\xff\xfe", b"", b"tail"]


def pack(texts, length):
  ids = lay_end_to_end([TOKENIZER.encode(text) for text in texts], TOKENIZER.boundary)
  return PackedRows(ids, length, TOKENIZER.boundary)


def unpack(rows):
  """Splits the rows' real pairs back into documents at each boundary target."""
  documents, current = [], []
  for index in range(len(rows)):
    row = rows[index]
    for token, target in zip(row.tokens[row.loss_mask], row.targets[row.loss_mask], strict=True):
      current.append((int(token), int(target)))
      if target == TOKENIZER.boundary:
        documents.append(current)
        current = []
  assert not current
  return documents


@pytest.mark.parametrize("length", [1, 2, 7, 16, 64, 200])
def test_tokens_in_are_tokens_out(length):
  documents = unpack(pack(TEXTS, length))
  assert len(documents) == len(TEXTS)
  for pairs, text in zip(documents, TEXTS, strict=True):
    assert bytes(target for _, target in pairs[:-1]) == text
    assert [token for token, _ in pairs] == [TOKENIZER.boundary, *text]


@pytest.mark.parametrize("length", [4, 16, 200])
def test_segments_positions_and_padding(length):
  rows = pack(TEXTS, length)
  assert rows.pairs == sum(len(text) + 1 for text in TEXTS)
  real = 0
  for index in range(len(rows)):
    row = rows[index]
    assert all(array.shape == (length,) for array in row)
    assert all(array.dtype == np.int32 for array in row[:4])
    np.testing.assert_array_equal(row.loss_mask, row.segment_ids > 0)
    starts = row.tokens == TOKENIZER.boundary
    np.testing.assert_array_equal(row.positions[starts & row.loss_mask], 0)
    steps = np.diff(row.segment_ids[row.loss_mask])
    np.testing.assert_array_equal(steps, starts[row.loss_mask][1:])
    inside = np.flatnonzero(steps == 0)
    np.testing.assert_array_equal(np.diff(row.positions)[inside], 1)
    assert row.positions[0] == 0
    real += row.loss_mask.sum()
  assert real == rows.pairs


def test_rows_outside_and_no_documents_are_refused():
  rows = pack(TEXTS, 16)
  for index in (-1, len(rows)):
    with pytest.raises(IndexError):
      rows[index]
  with pytest.raises(InputError, match="no documents"):
    pack([], 16)


def test_tokenizer_round_trip():
  text = "héllo\n\x00"
  assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
  assert TOKENIZER.decode([256, 104, 256]) == "h"
  assert TOKENIZER.decode([0xFF]) == "�"
