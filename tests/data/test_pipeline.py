"""The embedded corpus and the order of batches."""

import dataclasses
import hashlib
import os

import numpy as np
import pytest

from ldm_jax.data import Dataset, PackedRows, load_dataset
from ldm_jax.data.stdlib import is_held_out, stdlib_documents
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import InputError
from tests.rig import tiny_config


def small_dataset(rows=5, batch_size=2, seed=0):
  documents = [np.arange(3, dtype=np.uint16) + 10 * i for i in range(rows)]
  packed = PackedRows(documents, 4, 256)
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
