"""Documents packed into rows of T tokens, with boundaries that attention and loss respect.

A document of n tokens becomes n + 1 training pairs: the boundary id predicts the first token, each
token the next, the last token the boundary id.  Documents are laid end to end and cut into rows, so
no token is lost, a long document continues in the next row, and nothing is ever trained to predict
across two documents: the target of a document's last token is the boundary, not the next text.
"""

from collections.abc import Sequence
from typing import NamedTuple

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


class PackedRows:
  """Random access to the rows that a list of tokenized documents packs into."""

  def __init__(self, documents: Sequence[np.ndarray], length: int, boundary: int):
    """Packs in the given order.

    Args:
      documents: token ids of each document, uint16 [n]; empty ones count as one boundary pair.
      length: T.
      boundary: the id before the first and after the last token of each document.

    Raises:
      InputError: without any document.
    """
    if not documents:
      raise InputError("no documents to pack into rows")
    self.length = length
    sizes = np.array([len(document) + 1 for document in documents])
    self._starts = np.concatenate([[0], np.cumsum(sizes)])
    edge = np.array([boundary], documents[0].dtype)
    # Every document has a boundary on both sides; two in a row would be the same id, so one array
    # holds inputs and, shifted by one, targets.
    self._ids = np.concatenate(
      [part for document in documents for part in (edge, document)] + [edge]
    )

  def __len__(self) -> int:
    """Rows, the last one padded."""
    return -(-self.pairs // self.length)

  @property
  def pairs(self) -> int:
    """Real (token, target) pairs in all rows."""
    return int(self._starts[-1])

  def __getitem__(self, index: int) -> Batch:
    """Row `index`, arrays [T].

    Raises:
      IndexError: outside 0 … len − 1.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    start = int(index) * self.length
    stop = min(start + self.length, self.pairs)
    pairs = np.arange(start, stop)
    document = np.searchsorted(self._starts, pairs, side="right") - 1
    row = Batch(
      tokens=self._ids[start:stop],
      targets=self._ids[start + 1 : stop + 1],
      positions=pairs - np.maximum(self._starts[document], start),
      segment_ids=document - document[0] + 1,
      loss_mask=np.ones(stop - start, bool),
    )
    padding = (0, self.length - (stop - start))
    return Batch(
      *(np.pad(array.astype(bool if array.dtype == bool else np.int32), padding) for array in row)
    )


def empty_rows(count: int, length: int) -> Batch:
  """Rows of padding, for the end of a last, partial batch."""
  zeros = np.zeros((count, length), np.int32)
  return Batch(zeros, zeros, zeros, zeros, zeros.astype(bool))
