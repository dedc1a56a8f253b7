"""Encoding a document piece by piece, so that its length does not matter."""

import codecs
import re
from collections.abc import Callable, Iterator

import numpy as np

from ldm_jax.data.tokenizer import HuggingFaceTokenizer, Tokenizer

# Characters that a tokenizer from a file gets at once; its own records cost ~100 bytes a token.
PIECE = 2**18
_BETWEEN_WORDS = re.compile(r"\w (?=\w)")
_BEFORE_SPACE = re.compile(r"\S(?=\s)")


class DocumentEncoder:
  """Encodes the UTF-8 text of one document, given in pieces of any size.

  Bytes are taken as they are.  For a tokenizer from a file, invalid UTF-8 becomes U+FFFD, and a
  document of more than `PIECE` characters is encoded in several parts.  They are cut before a
  space between two words, where byte-level BPE never merges, so the ids are the same as in one go;
  a tokenizer that adds something at the start of a text adds it to each part.

  Attributes:
    replaced: invalid sequences replaced so far.
    first_replaced: byte offset of the first one in the document, or None.
  """

  def __init__(self, tokenizer: Tokenizer, piece: int = PIECE):
    """Starts a document; `piece` is the most characters encoded at once."""
    self.replaced, self.first_replaced = 0, None
    self._tokenizer, self._piece = tokenizer, piece
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
    self._offset, self._text = 0, ""

  def feed(self, data: bytes) -> Iterator[np.ndarray]:
    """Takes the next bytes and yields the ids that are settled."""
    if not isinstance(self._tokenizer, HuggingFaceTokenizer):
      yield self._tokenizer.encode(data)
      return
    self._text += self._decode(data, final=False)
    yield from self._encode(while_longer_than=self._piece)

  def finish(self) -> Iterator[np.ndarray]:
    """Yields the ids of what is left."""
    self._text += self._decode(b"", final=True)
    yield from self._encode(while_longer_than=0)

  def _encode(self, while_longer_than):
    start = 0
    while len(self._text) - start > while_longer_than:
      end = start + cut_between_words(self._text[start : start + self._piece + 1], self._piece)
      yield self._tokenizer.encode(self._text[start:end])
      start = end
    self._text = self._text[start:]

  def _decode(self, data, final):
    pending = self._decoder.getstate()[0]
    text = self._decoder.decode(data, final)
    if "\ufffd" in text:
      self._count(pending, data, text)
    self._offset += len(data)
    return text

  def _count(self, pending, data, text):
    """Counts replacements, which are not those U+FFFD that were in the text already."""
    data = pending + data
    decoded = data[: len(data) - len(self._decoder.getstate()[0])]
    replaced = text.count("\ufffd") - decoded.count("\ufffd".encode())
    if replaced and self.first_replaced is None:
      try:
        decoded.decode()
      except UnicodeDecodeError as error:
        self.first_replaced = self._offset - len(pending) + error.start
    self.replaced += replaced


def cut_between_words(text: str, longest: int) -> int:
  """Where to cut a text of more than `longest` characters; its length if it has no more."""
  if len(text) <= longest:
    return len(text)
  for pattern in (_BETWEEN_WORDS, _BEFORE_SPACE):
    for start in (max(longest - 4096, 0), 0):
      matches = [match.end() for match in pattern.finditer(text, start, longest + 1)]
      ends = [end - (pattern is _BETWEEN_WORDS) for end in matches]
      if ends and ends[-1] > 0:
        return ends[-1]
  return longest


def encode_document(
  tokenizer: Tokenizer, pieces: Iterator[bytes], take: Callable[[np.ndarray], None]
) -> DocumentEncoder:
  """Encodes a whole document, handing its ids to `take` as they come; returns the encoder."""
  encoder = DocumentEncoder(tokenizer)
  for piece in pieces:
    for ids in encoder.feed(piece):
      take(ids)
  for ids in encoder.finish():
    take(ids)
  return encoder
