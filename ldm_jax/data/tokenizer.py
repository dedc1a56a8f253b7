"""Tokenizers: bytes, and any JSON file of the Hugging Face `tokenizers` library."""

import hashlib
from collections.abc import Iterable
from typing import SupportsInt, TypeAlias

import numpy as np
import tokenizers
from etils import epath

from ldm_jax.errors import InputError
from ldm_jax.typing import PathLike

# Names that tokenizers give to the end of a document, the first one present is taken.
BOUNDARIES = ("<|endoftext|>", "<eos>", "</s>", "<|eos|>", "<|end_of_text|>", "<|im_end|>")


class ByteTokenizer:
  """Text as bytes.  Every byte value is text; padding has no id of its own (see `Batch`)."""

  kind = "bytes"
  vocab_size = 257
  boundary = 256
  dtype = np.dtype(np.uint16)
  sha256 = None

  def known_ids(self) -> np.ndarray:
    """Which ids below `vocab_size` there are, bool [vocab_size]."""
    return np.ones(self.vocab_size, bool)

  def encode(self, text: str | bytes) -> np.ndarray:
    """Text or raw bytes to uint16 ids [n]; no boundary id is added."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.uint16)

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Ids to text; boundary ids are dropped and broken UTF-8 shows as U+FFFD."""
    return bytes(int(i) for i in ids if i != self.boundary).decode("utf-8", "replace")


class HuggingFaceTokenizer:
  """A tokenizer of the Hugging Face `tokenizers` library.

  Attributes:
    vocab_size: ids in all, added tokens included.
    boundary: the id between documents; no text ever encodes to it.
    dtype: uint16 where every id fits, else uint32.
    json: the file's contents, and sha256 its hash.
  """

  kind = "tokenizers"

  def __init__(self, json: str, boundary: str | None = None, name: str = "tokenizer"):
    """Parses the contents of a tokenizer file.

    Args:
      json: what `tokenizers.Tokenizer.save` writes.
      boundary: the token between documents; by default the first of `BOUNDARIES` that it knows.
      name: of the file, for messages.

    Raises:
      InputError: if it is no tokenizer, or has no such boundary token.
    """
    self.json = json
    self.sha256 = hashlib.sha256(json.encode()).hexdigest()
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(json)
    except Exception as error:  # the library raises bare Exception
      raise InputError(f"{name} is not a tokenizer of the tokenizers library: {error}") from error
    # Text that looks like a special token is text, never that token.
    self._tokenizer.encode_special_tokens = True
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    ids = self._tokenizer.get_vocab(with_added_tokens=True)
    self.boundary_token = _find_boundary(ids, boundary, name)
    self.boundary = ids[self.boundary_token]
    # Ids may have holes, so the number of tokens is not enough.
    self.vocab_size = max(max(ids.values()) + 1, self._tokenizer.get_vocab_size())
    self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

  def known_ids(self) -> np.ndarray:
    """Which ids below `vocab_size` there are, bool [vocab_size]; there may be holes."""
    known = np.zeros(self.vocab_size, bool)
    known[list(self._tokenizer.get_vocab(with_added_tokens=True).values())] = True
    return known

  def encode(self, text: str | bytes) -> np.ndarray:
    """Text, or bytes of UTF-8, to ids [n]; no boundary or other special id is added.

    Invalid bytes are replaced by U+FFFD.

    Raises:
      InputError: if the text cannot be encoded without the boundary id.
    """
    if isinstance(text, bytes):
      text = text.decode("utf-8", "replace")
    ids = self._encode(text)
    if (ids == self.boundary).any():
      ids = self._encode_apart(text)
    return ids

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """Ids to text; boundary ids are dropped."""
    kept = [int(i) for i in ids if i != self.boundary]
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def _encode(self, text):
    encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encodings[0].ids, self.dtype)

  def _encode_apart(self, text):
    """Cuts the text inside each mention of the boundary token, so that it is encoded as letters."""
    token = self.boundary_token
    pieces = text.split(token)
    half = len(token) // 2
    for index in range(len(pieces) - 1):
      pieces[index] += token[:half]
      pieces[index + 1] = token[half:] + pieces[index + 1]
    ids = np.concatenate([self._encode(piece) for piece in pieces])
    if (ids == self.boundary).any():
      raise InputError(
        f"ordinary text encodes to the boundary token {token!r}; name another one with --boundary"
      )
    return ids


Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(path: PathLike, boundary: str | None = None) -> Tokenizer:
  """Reads a tokenizer.

  Args:
    path: "bytes", or a JSON file of the `tokenizers` library, local or gs://.
    boundary: its token between documents, see `HuggingFaceTokenizer`.

  Raises:
    InputError: if the file cannot be read or is no tokenizer.
  """
  if str(path) == "bytes":
    if boundary is not None:
      raise InputError("--boundary names a token of a tokenizer file; bytes have a boundary id")
    return ByteTokenizer()
  try:
    json = epath.Path(path).read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise InputError(f"tokenizer {path}: {getattr(error, 'strerror', None) or error}") from error
  return HuggingFaceTokenizer(json, boundary, f"tokenizer {path}")


def _find_boundary(ids, wanted, name):
  if wanted is not None:
    if wanted not in ids:
      raise InputError(f"{name} has no token {wanted!r}; name one it has with --boundary")
    return wanted
  for token in BOUNDARIES:
    if token in ids:
      return token
  raise InputError(
    f"{name} has none of the usual tokens between documents ({', '.join(BOUNDARIES)}); name one "
    "with --boundary"
  )
