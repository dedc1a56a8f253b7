"""From a config to batches: which rows a step sees, and in which order."""

import dataclasses
import functools
import hashlib

import grain
import numpy as np

from ldm_jax.config import Config
from ldm_jax.data.packing import Batch, PackedRows, empty_rows
from ldm_jax.data.stdlib import stdlib_documents
from ldm_jax.data.tokenizer import ByteTokenizer

_EVALUATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Training and held-out rows with the tokenizer they were made with.

  The training batch of a step is a function of (seed, step): rows are permuted anew in each epoch
  and follow each other without a gap, so a batch may span two epochs.
  """

  train_rows: PackedRows
  held_out_rows: PackedRows
  tokenizer: ByteTokenizer
  batch_size: int
  seed: int
  fingerprint: str

  def train_batch(self, step: int) -> Batch:
    """The batch [B, T] of training step `step`, counted from 0."""
    return self._train[step]

  def held_out_batches(self, count: int) -> list[Batch]:
    """The same batches [B, T] at every call; the last one is filled up with padding rows.

    Args:
      count: batches; 0 for all held-out rows.
    """
    total = -(-len(self.held_out_rows) // self.batch_size)
    count = min(count or total, total)
    shuffled = grain.MapDataset.source(self.held_out_rows).shuffle(seed=_EVALUATION_SEED)
    batches = shuffled.batch(self.batch_size)
    return [self._fill(batches[index]) for index in range(count)]

  def _fill(self, batch):
    missing = self.batch_size - len(batch.tokens)
    padding = empty_rows(missing, batch.tokens.shape[1])
    return Batch(*(np.concatenate(pair) for pair in zip(batch, padding, strict=True)))

  @functools.cached_property
  def _train(self):
    rows = grain.MapDataset.source(self.train_rows).shuffle(seed=self.seed).repeat()
    return rows.batch(self.batch_size, drop_remainder=True)


def load_dataset(config: Config) -> Dataset:
  """Loads, tokenizes and packs what the data section names.

  Raises:
    InputError: if the source cannot be read.
  """
  tokenizer = ByteTokenizer()
  train, held_out = stdlib_documents()
  digest = hashlib.sha256()
  for name, contents in (*train, *held_out):
    digest.update(f"{name}\0{len(contents)}\0".encode())
    digest.update(contents)

  def pack(documents):
    tokenized = [tokenizer.encode(contents) for _, contents in documents]
    return PackedRows(tokenized, config.data.sequence_length, tokenizer.boundary)

  return Dataset(
    train_rows=pack(train),
    held_out_rows=pack(held_out),
    tokenizer=tokenizer,
    batch_size=config.data.batch_size,
    seed=config.data.seed,
    fingerprint=digest.hexdigest()[:16],
  )
