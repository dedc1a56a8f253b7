"""Random rows made on the fly, for speed tests: no disk, no text, nothing to learn."""

import numpy as np

from ldm_jax.data.packing import Batch


class SyntheticRows:
  """Rows of uniformly random ids, each one document; row `index` depends on (seed, index) alone."""

  def __init__(self, count: int, length: int, vocab_size: int, seed: tuple[int, ...]):
    """Makes nothing yet.

    Args:
      count: rows.
      length: T.
      vocab_size: ids are below it.
      seed: non-negative numbers; rows of different seeds are independent.
    """
    self.length = length
    self._count, self._vocab_size, self._seed = count, vocab_size, seed

  def __len__(self) -> int:
    """Rows."""
    return self._count

  @property
  def pairs(self) -> int:
    """Real (token, target) pairs in all rows."""
    return self._count * self.length

  def __getitem__(self, index: int) -> Batch:
    """Row `index`, arrays [T].

    Raises:
      IndexError: outside 0 … len − 1.
    """
    if not 0 <= index < len(self):
      raise IndexError(f"row {index} of {len(self)}")
    random = np.random.default_rng((*self._seed, int(index)))
    ids = random.integers(0, self._vocab_size, self.length + 1, dtype=np.int32)
    positions = np.arange(self.length, dtype=np.int32)
    ones = np.ones(self.length, np.int32)
    return Batch(ids[:-1], ids[1:], positions, ones, ones.astype(bool))
