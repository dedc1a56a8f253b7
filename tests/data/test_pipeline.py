"""The embedded corpus and the order of batches."""

import dataclasses
import hashlib
import multiprocessing
import os

import numpy as np
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import Dataset, PackedRows, lay_end_to_end, load_dataset
from ldm_jax.data.packing import Batch
from ldm_jax.data.stdlib import is_held_out, stdlib_documents
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import InputError
from tests.rig import tiny_config


def small_dataset(rows=5, batch_size=2, seed=0):
  documents = [np.arange(3, dtype=np.uint16) + 10 * i for i in range(rows)]
  packed = PackedRows(lay_end_to_end(documents, 256), 4, 256)
  return Dataset(packed, packed, ByteTokenizer(), batch_size, seed, "x")


def test_corpus_is_the_standard_library_without_tests_split_by_path():
  train, held_out = stdlib_documents()
  names = [name for name, _ in train + held_out]
  assert len(set(names)) == len(names) > 400
  folders = {part for name in names for part in name.split("/")}
  assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
  contents = dict(train + held_out)
  with open(os.__file__, "rb") as file:
    assert contents["os.py"] == file.read()
  assert all(contents.values())
  for name, _ in train:
    assert int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 20
  assert 0.01 < len(held_out) / len(names) < 0.1


def test_the_same_files_give_the_same_corpus_wherever_they_are(tmp_path):
  names = [f"pkg/m{i}.py" for i in range(40)]
  assert {is_held_out(name) for name in names} == {True, False}
  for root in ("a", "b"):
    for name in names if root == "a" else reversed(names):
      path = tmp_path / root / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(name)
    for stray in ("pkg/test/t.py", "pkg/notes.txt", "pkg/m.py~", "_sysconfigdata_x.py"):
      path = tmp_path / root / stray
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text("stray")
    (tmp_path / root / "empty.py").touch()
  assert stdlib_documents(tmp_path / "a") == stdlib_documents(tmp_path / "b")
  train, held_out = stdlib_documents(tmp_path / "a")
  assert sorted(name for name, _ in train + held_out) == sorted(names)


def test_a_python_without_source_files_is_refused(tmp_path):
  with pytest.raises(InputError, match=r"0 training and 0 held-out \.py files"):
    stdlib_documents(tmp_path)


def test_a_batch_is_a_function_of_seed_and_step():
  one, again = (load_dataset(tiny_config()) for _ in range(2))
  for step in (7, 0, 7):
    for left, right in zip(one.train_batch(step), again.train_batch(step), strict=True):
      np.testing.assert_array_equal(left, right)
  other = dataclasses.replace(one, seed=1)
  assert (one.train_batch(0).tokens != other.train_batch(0).tokens).any()
  assert one.fingerprint == again.fingerprint


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_load_parts_of_the_same_batch(hosts):
  dataset = small_dataset(rows=11, batch_size=4)
  for step in (0, 2, 5, 40):
    rows = [range(4)[host::hosts] for host in range(hosts)]
    parts = [dataset.train_batch(step, own) for own in rows]
    for whole, *pieces in zip(dataset.train_batch(step), *parts, strict=True):
      for own, piece in zip(rows, pieces, strict=True):
        np.testing.assert_array_equal(whole[own], piece)


def test_a_host_reads_only_its_own_rows():
  dataset = small_dataset(rows=12, batch_size=4)
  seen = []

  class Spy:
    pairs = dataset.train_rows.pairs

    def __len__(self):
      return 12

    def __getitem__(self, index):
      seen.append(index)
      return dataset.train_rows[index]

  rows = {}
  for host in range(2):
    spied = dataclasses.replace(dataset, train_rows=PackedRows.__new__(PackedRows))
    object.__setattr__(spied, "train_rows", Spy())
    seen.clear()
    for step in range(3):
      spied.train_batch(step, (host, 3 - host))
    rows[host] = set(seen)
  assert len(rows[0]) == len(rows[1]) == 6
  assert not rows[0] & rows[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_loaded_ahead_equal_those_asked_for(workers):
  dataset = dataclasses.replace(small_dataset(rows=11, batch_size=4), workers=workers)
  for first, rows in ((0, None), (5, (1, 2))):
    with dataset.train_batches(first, 9, rows) as batches:
      loaded = list(batches)
    assert len(loaded) == 9 - first
    for step, batch in enumerate(loaded, first):
      assert isinstance(batch, Batch)
      for left, right in zip(batch, dataset.train_batch(step, rows), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def test_leaving_early_stops_the_workers():
  before = set(multiprocessing.active_children())
  dataset = dataclasses.replace(small_dataset(rows=11, batch_size=4), workers=2)
  with dataset.train_batches(0, 1000) as batches:
    next(batches)
    assert set(multiprocessing.active_children()) - before
  assert not set(multiprocessing.active_children()) - before


def test_synthetic_rows_depend_on_seed_and_index_alone():
  config = tiny_config()
  config = dataclasses.replace(config, data=DataConfig("synthetic", sequence_length=32, seed=3))
  one, again = load_dataset(config), load_dataset(config)
  for left, right in zip(one.train_batch(5), again.train_batch(5), strict=True):
    np.testing.assert_array_equal(left, right)
  batch = one.train_batch(0)
  assert batch.tokens.shape == (8, 32)
  assert batch.loss_mask.all()
  assert 200 < batch.tokens.max() < config.model.vocab_size
  np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
  assert len({row.tobytes() for row in batch.tokens}) == 8
  assert (batch.tokens != one.held_out_batches(1)[0].tokens).any()
  other = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=4))
  assert (load_dataset(other).train_batch(0).tokens != batch.tokens).any()


def test_every_row_comes_once_an_epoch_in_a_new_order_each_time():
  dataset = small_dataset(rows=6, batch_size=2)
  epochs = [
    np.concatenate([dataset.train_batch(3 * epoch + i).tokens for i in range(3)])
    for epoch in range(3)
  ]
  orders = [tuple(rows[:, 1]) for rows in epochs]
  assert [sorted(order) for order in orders] == [[10 * i for i in range(6)]] * 3
  assert len(set(orders)) > 1


def test_a_corpus_smaller_than_a_batch_repeats_its_rows():
  batch = small_dataset(rows=2, batch_size=5).train_batch(0)
  assert batch.tokens.shape == (5, 4)
  assert set(batch.tokens[:, 1]) == {0, 10}


def test_held_out_batches_cover_all_rows_once_and_pad_the_last():
  dataset = small_dataset(rows=5, batch_size=2)
  batches = dataset.held_out_batches(0)
  assert [batch.tokens.shape for batch in batches] == [(2, 4)] * 3
  rows = np.concatenate([batch.tokens[batch.loss_mask.any(axis=1)] for batch in batches])
  assert sorted(rows[:, 1]) == [0, 10, 20, 30, 40]
  assert not batches[-1].loss_mask[1].any()
  assert len(dataset.held_out_batches(2)) == 2
  for left, right in zip(batches, dataset.held_out_batches(0), strict=True):
    np.testing.assert_array_equal(left.tokens, right.tokens)
