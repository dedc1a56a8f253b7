"""From a config to batches: which rows a step sees, in which order, and loading them ahead."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import TypeAlias

import grain
import numpy as np
from absl import flags

from ldm_jax.config import Config
from ldm_jax.data.packing import Batch, PackedRows, empty_rows, lay_end_to_end
from ldm_jax.data.prepared import PreparedData, prepared_tokenizer
from ldm_jax.data.stdlib import stdlib_documents
from ldm_jax.data.synthetic import SyntheticRows
from ldm_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from ldm_jax.errors import InputError

Rows: TypeAlias = PackedRows | SyntheticRows

_EVALUATION_SEED = 0
_SYNTHETIC_ROWS = {"train": 2**20, "held_out": 2**10}
_AHEAD = 4  # batches loaded before they are asked for


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Training and held-out rows with the tokenizer they were made with.

  The training batch of a step is a function of (seed, step): rows are permuted anew in each epoch
  and follow each other without a gap, so a batch may span two epochs.  Every row is found by its
  number, so the number of finished steps is all there is to restore: no iterator has state of its
  own, and any host count, worker count or point of resume sees the same batches.

  Attributes:
    train_rows: to train on.
    held_out_rows: to evaluate on.
    tokenizer: of the ids; None if they stand for no text.
    batch_size: rows of a batch, over all hosts.
    seed: of the order of rows.
    fingerprint: names the data, to tell them from others on a resume.
    workers: processes that load batches ahead; 0 for a thread.
  """

  train_rows: Rows
  held_out_rows: Rows
  tokenizer: Tokenizer | None
  batch_size: int
  seed: int
  fingerprint: str
  workers: int = 0

  def train_batch(self, step: int, rows: Sequence[int] | None = None) -> Batch:
    """The batch [B, T] of training step `step`, counted from 0.

    Args:
      step: finished steps before it.
      rows: which rows of the batch to load, the others are not read; None for all.
    """
    return self._steps(rows)[step]

  def train_batches(
    self, first: int, stop: int, rows: Sequence[int] | None = None
  ) -> "BatchIterator":
    """The batches of steps `first` … `stop` − 1, equal to `train_batch`, loaded ahead.

    Close the iterator after use, or use it as a context.
    """
    steps = self._steps(rows)[slice(first, stop)]
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
    dataset = steps.to_iter_dataset(ahead)
    if self.workers:
      if not flags.FLAGS.is_parsed():  # grain reads flags of its own, which only absl.app parses
        flags.FLAGS.mark_as_parsed()
      options = grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=_AHEAD)
      dataset = dataset.mp_prefetch(options, worker_init_fn=_in_a_worker)
    return BatchIterator(dataset, starts_workers=self.workers > 0)

  def held_out_batches(self, count: int) -> list[Batch]:
    """The same batches [B, T] at every call; the last one is filled up with padding rows.

    Args:
      count: batches; 0 for all held-out rows.
    """
    rows = self.evaluation_rows()
    limit = count * self.batch_size or len(rows)
    return list(batches_of(rows, limit, self.batch_size))

  def evaluation_rows(self, part: str = "held_out") -> grain.MapDataset:
    """The rows of a part, "held_out" or "train", in the order of which evaluations take the first.

    It has nothing to do with the order in which training takes them.
    """
    rows = self.held_out_rows if part == "held_out" else self.train_rows
    return grain.MapDataset.source(rows).shuffle(seed=_EVALUATION_SEED)

  def _steps(self, rows):
    """The chosen rows of the batch of every step."""
    rows = tuple(range(self.batch_size) if rows is None else rows)
    chosen = grain.MapDataset.source(_Chosen(self._ordered_rows, rows, self.batch_size))
    return chosen.batch(len(rows), drop_remainder=True)

  @functools.cached_property
  def _ordered_rows(self):
    return grain.MapDataset.source(self.train_rows).shuffle(seed=self.seed).repeat()


def batches_of(rows: Rows | grain.MapDataset, limit: int, batch_size: int) -> Iterator[Batch]:
  """The first `limit` rows, or all there are, as batches [B, T]; the last one has padding rows."""
  limit = min(limit, len(rows))
  for start in range(0, limit, batch_size):
    batch = [rows[index] for index in range(start, min(start + batch_size, limit))]
    missing = batch_size - len(batch)
    padding = empty_rows(missing, batch[0].tokens.shape[0])
    yield Batch(
      *(
        np.concatenate([np.stack(arrays), fill])
        for *arrays, fill in zip(*batch, padding, strict=True)
      )
    )


@dataclasses.dataclass(frozen=True)
class _Chosen:
  """Some rows of each batch, batch after batch."""

  ordered: grain.MapDataset
  rows: tuple[int, ...]
  batch_size: int

  def __len__(self):
    return len(self.ordered) // self.batch_size * len(self.rows)

  def __getitem__(self, index):
    step, place = divmod(index, len(self.rows))
    return self.ordered[step * self.batch_size + self.rows[place]]


class BatchIterator(contextlib.AbstractContextManager):
  """Batches that a thread or worker processes load ahead; leaving the context stops them."""

  def __init__(self, dataset: grain.IterDataset, starts_workers: bool):
    """Starts loading, and the worker processes if there are to be any, at the first `next`."""
    self._iterator, self._starts_workers = iter(dataset), starts_workers

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if not self._starts_workers:
      return next(self._iterator)
    # A signal to the whole group while a worker starts would leave both waiting for each other.
    resource_tracker.ensure_running()  # started later, it would lift the block
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
      return next(self._iterator)
    finally:
      self._starts_workers = False
      signal.pthread_sigmask(signal.SIG_SETMASK, before)

  def __exit__(self, *error: object) -> None:
    self.close()

  def close(self) -> None:
    """Stops loading."""
    self._iterator.close()


def _in_a_worker(number, count):
  """Leaves signals to the training process, which kills its workers, and ends when that is gone."""
  del number, count
  for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, signal.SIG_IGN)
  parent = os.getppid()

  def watch():
    while os.getppid() == parent:
      time.sleep(1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def load_dataset(config: Config) -> Dataset:
  """Opens what the data section names.

  Raises:
    InputError: if the source cannot be read or does not fit the model.
  """
  load = {"stdlib": _stdlib, "prepared": _prepared, "synthetic": _synthetic}[config.data.source]
  train, held_out, tokenizer, fingerprint = load(config)
  return Dataset(
    train_rows=train,
    held_out_rows=held_out,
    tokenizer=tokenizer,
    batch_size=config.data.batch_size,
    seed=config.data.seed,
    fingerprint=fingerprint,
    workers=config.data.workers,
  )


def load_tokenizer_of(config: Config) -> Tokenizer:
  """The tokenizer of a run's data; of a prepared set it is all that is read.

  Raises:
    InputError: if the data cannot be read or their ids stand for no text.
  """
  if config.data.source == "synthetic":
    raise InputError("data.source = synthetic: its random ids stand for no text")
  if config.data.source == "stdlib":
    return ByteTokenizer()
  try:
    return prepared_tokenizer(config.data.path)
  except InputError as error:
    raise InputError(
      f"data.path = {config.data.path}: {error}; if the folder has moved, give it with --data"
    ) from error


def _stdlib(config):
  tokenizer = ByteTokenizer()
  train, held_out = stdlib_documents()
  digest = hashlib.sha256()
  for name, contents in (*train, *held_out):
    digest.update(f"{name}\0{len(contents)}\0".encode())
    digest.update(contents)

  def pack(documents):
    ids = lay_end_to_end([tokenizer.encode(text) for _, text in documents], tokenizer.boundary)
    return PackedRows(ids, config.data.sequence_length, tokenizer.boundary)

  return pack(train), pack(held_out), tokenizer, digest.hexdigest()[:16]


def _prepared(config):
  data = PreparedData(config.data.path)
  tokenizer = data.tokenizer
  wanted = config.data.tokenizer
  if wanted is not None:
    other = load_tokenizer(
      wanted, getattr(tokenizer, "boundary_token", None) if wanted != "bytes" else None
    )
    if other.sha256 != tokenizer.sha256:
      raise InputError(
        f"data.tokenizer = {wanted} is not the tokenizer that {config.data.path} was made with; "
        "leave data.tokenizer out to use the data set's own"
      )
  if config.model.vocab_size < tokenizer.vocab_size:
    raise InputError(
      f"model.vocab_size = {config.model.vocab_size} is too small for {config.data.path}, whose "
      f"tokenizer has {tokenizer.vocab_size} ids; set model.vocab_size to at least that"
    )
  length, boundary = config.data.sequence_length, tokenizer.boundary
  train, held_out = (
    PackedRows(data.stream(part), length, boundary) for part in ("train", "held_out")
  )
  return train, held_out, tokenizer, data.fingerprint


def _synthetic(config):
  length, vocab_size, seed = (
    config.data.sequence_length,
    config.model.vocab_size,
    config.data.seed,
  )
  train, held_out = (
    SyntheticRows(count, length, vocab_size, (seed, number))
    for number, count in enumerate(_SYNTHETIC_ROWS.values())
  )
  return train, held_out, None, "synthetic-1"
