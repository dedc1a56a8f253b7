"""The byte tokenizer: ids 0–255 are the bytes of UTF-8 text, 256 marks a document boundary."""

from collections.abc import Iterable
from typing import SupportsInt

import numpy as np


class ByteTokenizer:
  """Text as bytes.  Every byte value is text; padding has no id of its own (see `Batch`)."""

  vocab_size = 257
  boundary = 256

  def encode(self, text: str | bytes) -> np.ndarray:
    """Text or raw bytes to uint16 ids [n]; no boundary id is added."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.uint16)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Ids to text; boundary ids are dropped and broken UTF-8 shows as U+FFFD."""
    return bytes(int(i) for i in ids if i != self.boundary).decode("utf-8", "replace")
