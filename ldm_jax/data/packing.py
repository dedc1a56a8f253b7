"""Documents packed into rows of T tokens, with boundaries that attention and loss respect.

A document of n tokens becomes n + 1 training pairs: the boundary id predicts the first token, each
token the next, the last token the boundary id.  Documents are laid end to end and cut into rows, so
no token is lost, a long document continues in the next row, and nothing is ever trained to predict
across two documents: the target of a document's last token is the boundary, not the next text.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ldm_jax.errors import InputError


class Batch(NamedTuple):
  """Packed rows, arrays [B, T]; one row has arrays [T].

  tokens: int32 input ids.
  targets: int32 ids to predict.
  positions: int32, counted from the start of the document's piece in this row.
  segment_ids: int32, 1, 2, … for the documents of a row; 0 is padding.
  loss_mask: bool, which targets are real.  Padding is told by this mask alone: its token id is 0,
    which is also an ordinary byte.
  """

  tokens: np.ndarray
  targets: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  loss_mask: np.ndarray


@runtime_checkable
class TokenStream(Protocol):
  """Documents end to end: a boundary id before each one and one more after the last.

  Every document has a boundary on both sides; two in a row would be the same id, so one sequence
  holds inputs and, shifted by one, targets.  The boundary id occurs nowhere inside a document, so
  it alone tells where documents start.  A NumPy array [n] is such a stream.
  """

  def __len__(self) -> int:
    """Ids in all."""

  def __getitem__(self, part: slice) -> np.ndarray:
    """The ids `part.start` … `part.stop` − 1, unsigned integers [n]."""


def lay_end_to_end(documents: Sequence[np.ndarray], boundary: int) -> np.ndarray:
  """The token stream of documents held in memory.

  Args:
    documents: token ids of each document, unsigned [n]; empty ones count as one boundary pair.
    boundary: the id before the first and after the last token of each document.

  Raises:
    InputError: without any document.
  """
  if not documents:
    raise InputError("no documents to pack into rows")
  edge = np.array([boundary], documents[0].dtype)
  return np.concatenate([part for document in documents for part in (edge, document)] + [edge])


class PackedRows:
  """Random access to the rows that a token stream is cut into."""

  def __init__(self, ids: TokenStream, length: int, boundary: int):
    """Cuts from the start, whatever documents there are.

    Args:
      ids: the stream, see `TokenStream`.
      length: T.
      boundary: its boundary id.

    Raises:
      InputError: if the stream has no document.
    """
    if len(ids) < 2:
      raise InputError("no documents to pack into rows")
    self.length = length
    self._ids, self._boundary = ids, boundary

  def __len__(self) -> int:
    """Rows, the last one padded."""
    return -(-self.pairs // self.length)

  @property
  def pairs(self) -> int:
    """Real (token, target) pairs in all rows."""
    return len(self._ids) - 1

  def __getitem__(self, index: int) -> Batch:
    """Row `index`, arrays [T].

    Raises:
      IndexError: outside 0 … len − 1.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    start = int(index) * self.length
    ids = self._ids[start : min(start + self.length, self.pairs) + 1].astype(np.int32)
    tokens, pairs = ids[:-1], np.arange(len(ids) - 1, dtype=np.int32)
    starts = tokens == self._boundary
    starts[0] = True  # a document that continues from the row before is the first segment
    row = Batch(
      tokens=tokens,
      targets=ids[1:],
      positions=pairs - np.maximum.accumulate(np.where(starts, pairs, 0)),
      segment_ids=np.cumsum(starts, dtype=np.int32),
      loss_mask=np.ones(len(tokens), bool),
    )
    if len(tokens) == self.length:
      return row
    return Batch(*(np.pad(array, (0, self.length - len(tokens))) for array in row))


def empty_rows(count: int, length: int) -> Batch:
  """Rows of padding, for the end of a last, partial batch."""
  zeros = np.zeros((count, length), np.int32)
  return Batch(zeros, zeros, zeros, zeros, zeros.astype(bool))
