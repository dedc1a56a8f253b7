"""A prepared data set trains like any other and is refused when it is damaged."""

import dataclasses
import json
import pickle
import shutil

import numpy as np
import pytest

from ldm_jax.config import DataConfig
from ldm_jax.data import PackedRows, PreparedData, lay_end_to_end, load_dataset, load_tokenizer
from ldm_jax.data.jobs import Settings
from ldm_jax.data.prepare import prepare
from ldm_jax.data.tokenizer import ByteTokenizer
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.training import loop
from ldm_jax.training.evaluation import evaluate
from ldm_jax.training.step import LossSums
from tests.data.corpora import read_documents, train_bpe, write_lines
from tests.rig import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Two inputs in two jobs, so two shards a part, each of several records."""
  folder = tmp_path_factory.mktemp("prepared")
  (folder / "in").mkdir()
  for name in "ab":
    write_lines(folder / "in" / f"{name}.jsonl", 200, ord(name))
  tokenizers = {"bytes": ByteTokenizer(), "bpe": load_tokenizer(train_bpe(folder / "tok.json"))}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("ldm_jax.data.jobs.JOB_BYTES", 1)
    patch.setattr("ldm_jax.data.shards.CHUNK", 1000)
    patch.setattr("ldm_jax.data.prepared.CHUNK", 1000)
    for name, tokenizer in tokenizers.items():
      prepare([str(folder / "in")], str(folder / name), tokenizer, Settings(held_out_one_in=5))
    yield folder


def config_for(path, tokenizer=None, **changes):
  config = tiny_config(**changes)
  data = DataConfig("prepared", str(path), tokenizer, sequence_length=32, batch_size=8)
  model = dataclasses.replace(config.model, vocab_size=512)
  return dataclasses.replace(config, model=model, data=data).validate()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("length", [7, 64, 1500])
def test_rows_equal_those_packed_in_memory(folder, kind, length):
  data = PreparedData(folder / kind)
  documents = [data.tokenizer.encode(text) for text in read_documents(folder / kind)["train"]]
  memory = PackedRows(
    lay_end_to_end(documents, data.tokenizer.boundary), length, data.tokenizer.boundary
  )
  stream = pickle.loads(pickle.dumps(data.stream("train")))
  assert len(data.meta["shards"]["train"]) == 2
  disk = PackedRows(stream, length, data.tokenizer.boundary)
  assert (len(disk), disk.pairs) == (len(memory), memory.pairs)
  for index in {*range(0, len(memory), 17), len(memory) - 1}:
    for left, right in zip(disk[index], memory[index], strict=True):
      np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaded_ahead_in_other_processes(folder, workers):
  # The smaller records of this test are not known to worker processes.
  dataset = load_dataset(config_for(folder / "bytes"))
  dataset = dataclasses.replace(dataset, workers=workers)
  if workers:
    whole = folder / "whole"
    with pytest.MonkeyPatch.context() as patch:
      for module in ("prepared", "shards"):
        patch.setattr(f"ldm_jax.data.{module}.CHUNK", 16_384)
      prepare([str(folder / "in")], str(whole), ByteTokenizer(), Settings(held_out_one_in=5))
      dataset = dataclasses.replace(load_dataset(config_for(whole)), workers=workers)
      compare_ahead(dataset)
  else:
    compare_ahead(dataset)


def compare_ahead(dataset):
  with dataset.train_batches(3, 7) as batches:
    for step, batch in enumerate(batches, 3):
      for left, right in zip(batch, dataset.train_batch(step), strict=True):
        np.testing.assert_array_equal(left, right)
  assert step == 6


def test_the_fingerprint_names_the_contents_wherever_they_lie(folder, tmp_path):
  shutil.copytree(folder / "bytes", tmp_path / "moved")
  assert PreparedData(tmp_path / "moved").fingerprint == PreparedData(folder / "bytes").fingerprint
  assert PreparedData(folder / "bpe").fingerprint != PreparedData(folder / "bytes").fingerprint


def cut(path):
  path.write_bytes(path.read_bytes()[:-100])


def cut_to_the_same_size(path):
  size = path.stat().st_size
  path.write_bytes(path.read_bytes()[: size // 2].ljust(size, b"\0"))


def swap(path):
  other = path.with_name("train-00001.array_record")
  first, second = path.read_bytes(), other.read_bytes()
  path.write_bytes(second)
  other.write_bytes(first)
  meta = json.loads(path.with_name("meta.json").read_text())
  one, two = meta["shards"]["train"]
  one["file_bytes"], two["file_bytes"] = two["file_bytes"], one["file_bytes"]
  path.with_name("meta.json").write_text(json.dumps(meta))


def foreign(path):
  """Another data set's file of the same size and number of records differs in its trailer alone."""
  meta = json.loads(path.with_name("meta.json").read_text())
  meta["shards"]["train"][0]["sha256"] = "0" * 64
  path.with_name("meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
  ("name", "damage", "message"),
  [
    ("train-00000.array_record", lambda path: path.unlink(), "is missing"),
    ("train-00000.array_record", cut, "it was cut or replaced"),
    ("train-00000.array_record", cut_to_the_same_size, "is damaged|another data set"),
    ("train-00000.array_record", swap, "shard of another data set"),
    ("train-00000.array_record", foreign, "shard of another data set"),
    ("meta.json", lambda path: path.unlink(), "has no meta.json.*ldm_jax.data.prepare"),
    ("meta.json", cut, "is damaged"),
    ("meta.json", lambda path: path.write_text("[]"), "is damaged"),
    ("meta.json", lambda path: path.write_text('{"format_version": 9}'), "has format 9"),
    ("tokenizer.json", lambda path: path.unlink(), "No such file"),
    ("tokenizer.json", lambda path: path.write_text("{}"), "not the tokenizer"),
  ],
)
def test_damage_is_told_by_the_file(folder, tmp_path, name, damage, message):
  shutil.copytree(folder / "bpe", tmp_path / "copy")
  damage(tmp_path / "copy" / name)
  with pytest.raises(InputError, match=message) as info:
    load_dataset(config_for(tmp_path / "copy"))
  assert name in str(info.value)


def test_a_record_that_rots_ends_the_run_by_the_file(folder, tmp_path):
  shutil.copytree(folder / "bytes", tmp_path / "copy")
  path = tmp_path / "copy" / "train-00000.array_record"
  contents = bytearray(path.read_bytes())
  dataset = load_dataset(config_for(tmp_path / "copy"))
  start = 1 + next(i for i in range(200, len(contents)) if contents[i : i + 8] == bytes(8)) // 2
  contents[start] ^= 255
  path.write_bytes(contents)
  dataset = load_dataset(config_for(tmp_path / "copy"))
  with (
    pytest.raises(TrainingError, match=r"reading record \d+ of .*train-00000\.array_record failed"),
    dataset.train_batches(0, 200) as batches,
  ):
    list(batches)


def test_settings_that_do_not_fit_are_refused(folder):
  with pytest.raises(InputError, match=r"data.source = prepared needs data.path"):
    config_for("")
  for data in (DataConfig(path="x"), DataConfig("synthetic", tokenizer="bytes")):
    with pytest.raises(InputError, match=r"belongs to data.source = prepared"):
      dataclasses.replace(tiny_config(), data=data).validate()
  config = config_for(folder / "bpe")
  small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=399))
  with pytest.raises(InputError, match=r"model.vocab_size = 399 .* has 400 ids"):
    load_dataset(small)
  assert load_dataset(config_for(folder / "bpe", str(folder / "tok.json")))
  assert load_dataset(config_for(folder / "bytes", "bytes"))
  for kind, other in (("bpe", "bytes"), ("bytes", str(folder / "tok.json"))):
    with pytest.raises(InputError, match=r"is not the tokenizer that .* was made with"):
      load_dataset(config_for(folder / kind, other))


def test_bits_per_byte_only_where_tokens_are_bytes(folder):
  batches = load_dataset(config_for(folder / "bpe")).held_out_batches(1)
  sums = lambda batch: LossSums(np.float32(2.0), np.float32(2.0), np.int32(8))
  assert set(evaluate(sums, batches, None)) == {"loss", "tokens"}
  assert set(evaluate(sums, batches, 256)) == {"loss", "tokens", "bits_per_byte"}


@pytest.mark.slow
def test_a_run_on_bpe_data_resumes_from_a_moved_folder_and_no_other(folder, tmp_path):
  config = config_for(folder / "bpe", kind="preln", steps=2, eval_every=2, checkpoint_every=1)
  assert loop.train(config, tmp_path / "run") == 0
  lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  assert [line["split"] for line in lines] == ["train", "train", "eval"]
  assert "bits_per_byte" not in lines[-1]
  shutil.copytree(folder / "bpe", tmp_path / "moved")
  moved = dataclasses.replace(config.data, path=str(tmp_path / "moved"), workers=0)
  assert loop.train(dataclasses.replace(config, data=moved), tmp_path / "run") == 0
  other = dataclasses.replace(config.data, path=str(folder / "bytes"))
  with pytest.raises(InputError, match="was trained on other data"):
    loop.train(dataclasses.replace(config, data=other), tmp_path / "run")
