"""An exported model is the trained one to the bit, or refused with one line."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ldm_jax import export
from ldm_jax.config import DataConfig, MeshConfig
from ldm_jax.data.prepare import main as prepare
from ldm_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from ldm_jax.errors import InputError, TrainingError
from ldm_jax.export import load_exported, main, save_exported
from ldm_jax.exported import is_export, read_exported_tokenizer
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import TrainedModel, load_trained
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import TrainState, abstract_state, make_model
from ldm_jax.training.workdir import save_config
from tests.rig import tiny_config, with_kind, with_model

LIMIT = 20_000  # bytes; the largest parameter has 49,152


def _mesh(*shape):
  return make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])


ONE = _mesh(1, 1, 1, 1)


def _trained(config, seed=0):
  """A model with random parameters."""
  rng = np.random.default_rng(seed)
  abstract = abstract_state(config, ONE).params
  params = jax.tree.map(
    lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32), leaf.sharding),
    abstract,
  )
  return TrainedModel(config, make_model(config), params, 7, ONE)


SMALL = with_model(tiny_config("preln"), blocks=1)


@pytest.fixture(scope="module")
def small():
  return _trained(SMALL)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, small):
  """An export in several files, to copy and damage."""
  folder = tmp_path_factory.mktemp("shelf") / "export"
  save_exported(folder, small, ByteTokenizer(), shard_bytes=LIMIT)
  return folder


@pytest.fixture
def copy(shelf, tmp_path):
  return shutil.copytree(shelf, tmp_path / "export")


def _refusal(folder):
  with pytest.raises(InputError) as caught:
    load_exported(folder, ONE)
  message = str(caught.value)
  assert "\n" not in message
  return message


def _edit(folder, **changes):
  """Changes keys of config.json; None removes one."""
  path = folder / "config.json"
  about = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))


def _rewrite(folder, change):
  """Changes the tensors of the first file, and what config.json says of it."""
  path = sorted(folder.glob("*.safetensors"))[0]
  tensors = load_file(path)
  change(tensors)
  save_file(tensors, path)
  about = json.loads((folder / "config.json").read_text())
  about["files"][path.name] = export._describe(path)
  (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("kind", ["preln", "rls", "hc", "mhc", "attnres", "shared_key"])
def test_a_model_comes_back_to_the_bit(tmp_path, kind):
  config = with_kind(kind, compute_dtype="bfloat16")
  trained = _trained(config)
  save_exported(tmp_path / "out", trained, ByteTokenizer(), shard_bytes=LIMIT)
  mesh = _mesh(1, 2, 2, 1)
  loaded = load_exported(tmp_path / "out", mesh)
  chex.assert_trees_all_equal(jax.device_get(loaded.params), jax.device_get(trained.params))
  chex.assert_trees_all_equal_shapes_and_dtypes(loaded.params, trained.params)
  expected = abstract_state(config, mesh).params
  jax.tree.map(
    lambda leaf, wanted: chex.assert_equal(leaf.sharding, wanted.sharding), loaded.params, expected
  )
  assert (loaded.step, loaded.mesh) == (7, mesh)
  assert loaded.config.model == config.model
  assert loaded.config.data.sequence_length == 32
  assert loaded.model.dtype == jnp.bfloat16


def test_files_are_what_other_tools_expect(shelf, small):
  index = json.loads((shelf / "model.safetensors.index.json").read_text())
  files = sorted(shelf.glob("*.safetensors"))
  assert len(files) > 2
  assert [path.name for path in files] == [
    f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
  ]
  held = {}
  for path in files:
    tensors = load_file(path)
    assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= LIMIT
    assert all(index["weight_map"][name] == path.name for name in tensors)
    held |= tensors
  assert held.keys() == index["weight_map"].keys()
  assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
  kernel = small.params["block_0"]["attention"]["query"]["kernel"]
  np.testing.assert_array_equal(held["block_0.attention.query.kernel"], kernel)
  assert len(held) == len(jax.tree.leaves(small.params))


def test_a_small_model_is_one_file_and_the_same_bytes_every_time(tmp_path, small):
  for name in "ab":
    save_exported(tmp_path / name, small, ByteTokenizer())
  assert {path.name for path in (tmp_path / "a").iterdir()} == {"config.json", "model.safetensors"}
  for path in (tmp_path / "a").iterdir():
    assert path.stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o666
    assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_bfloat16_rounds_the_large_matrices_only(tmp_path, small):
  sizes = save_exported(tmp_path / "half", small, None, "bfloat16")
  loaded = load_exported(tmp_path / "half", ONE)
  for path, was in jax.tree.leaves_with_path(small.params):
    now = loaded.params
    for key in path:
      now = now[key.key]
    cast = path[-1].key != "scale"
    assert was.ndim > 1 or not cast
    np.testing.assert_array_equal(
      now, was.astype(jnp.bfloat16).astype(jnp.float32) if cast else was
    )
  assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
  with safe_open(tmp_path / "half" / "model.safetensors", framework="np") as file:
    assert file.get_slice("embedder.embedding").get_dtype() == "BF16"
    assert file.get_slice("final_norm.scale").get_dtype() == "F32"
  assert read_exported_tokenizer(tmp_path / "half") is None
  again = save_exported(tmp_path / "again", loaded, None, "bfloat16")
  assert again == sizes
  assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
    tmp_path / "half" / "model.safetensors"
  ).read_bytes()


def test_load_trained_takes_an_export_for_a_workdir(shelf, small):
  loaded = load_trained(shelf, mesh=ONE)
  chex.assert_trees_all_equal(loaded.params, small.params)
  assert load_trained(shelf, 7, mesh=ONE).step == 7
  for arguments in ({"step": 8}, {"folder": "best"}):
    with pytest.raises(InputError, match="an export of step 7 and holds nothing else"):
      load_trained(shelf, mesh=ONE, **arguments)


# --- damage ---


def test_cut_and_flipped_files_are_refused(shelf, tmp_path):
  rng = np.random.default_rng(0)
  for number, path in enumerate(sorted(shelf.iterdir())):
    if path.name == "config.json":
      continue
    data = path.read_bytes()
    for case, cut in enumerate((0, 1, 7, 8, 9, len(data) // 2, len(data) - 1)):
      folder = shutil.copytree(shelf, tmp_path / f"cut_{number}_{case}")
      (folder / path.name).write_bytes(data[:cut])
      assert f"{path.name} has {cut} bytes" in _refusal(folder).replace(",", "")
    for case in range(4):
      folder = shutil.copytree(shelf, tmp_path / f"flip_{number}_{case}")
      changed = bytearray(data)
      changed[rng.integers(len(data)) if case else 0] ^= 1 << rng.integers(8)
      (folder / path.name).write_bytes(changed)
      assert f"{path.name} is damaged or another export's" in _refusal(folder)


def test_a_damaged_config_is_refused_or_read(copy, small):
  """Whatever byte changes, there is one line, or the same parameters."""
  path = copy / "config.json"
  data, rng, lines = path.read_bytes(), np.random.default_rng(1), []
  for case in range(60):
    changed = bytearray(data)
    if case < 20:
      changed = changed[: rng.integers(len(data) - 2)]
    else:
      changed[rng.integers(len(data))] = rng.integers(256)
    path.write_bytes(changed)
    try:
      chex.assert_trees_all_equal(load_exported(copy, ONE).params, small.params)
    except InputError as error:
      lines.append(str(error))
  assert len(lines) >= 20
  assert not any("\n" in line for line in lines)


def test_swapped_and_strange_files_are_refused(copy, tmp_path):
  first, second = sorted(copy.glob("*.safetensors"))[:2]
  contents = first.read_bytes(), second.read_bytes()
  first.write_bytes(contents[1])
  second.write_bytes(contents[0])
  assert first.name in _refusal(copy)
  save_exported(tmp_path / "other", _trained(SMALL, seed=1), ByteTokenizer(), shard_bytes=LIMIT)
  first.write_bytes((tmp_path / "other" / first.name).read_bytes())
  second.write_bytes(contents[1])
  assert f"{first.name} is damaged or another export's" in _refusal(copy)
  first.unlink()
  assert f"{first.name} cannot be read: No such file" in _refusal(copy)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda held: held.pop("block_0.attention.key.kernel"),
      "1 parameters of the model are missing",
    ),
    (
      lambda held: held.update(lost=np.ones(2)),
      "1 parameters are none of the model's, the first los",
    ),
    (
      lambda held: held.update({"block_0.attention.key.kernel": np.ones(2, np.float32)}),
      r"key.kernel has shape \(2,\), and config.json makes it \(32, 4, 8\)",
    ),
    (
      lambda held: held.update({"block_0.attention.key.kernel": np.ones((32, 4, 8))}),
      "key.kernel is F64 and must be F32 or BF16",
    ),
    (lambda held: held.update({"final_norm.scale": np.ones(32)}), "final_norm.scale is in .* too"),
  ],
)
def test_parameters_that_do_not_fit_the_config_are_named(copy, change, message):
  _rewrite(copy, change)
  with pytest.raises(InputError, match=message):
    load_exported(copy, ONE)


def test_a_file_that_is_no_safetensors_is_named(copy):
  path = sorted(copy.glob("*.safetensors"))[0]
  path.write_bytes(b"PK" + bytes(100))
  about = json.loads((copy / "config.json").read_text())
  about["files"][path.name] = export._describe(path)
  _edit(copy, files=about["files"])
  assert f"{path.name} is no safetensors file" in _refusal(copy)


def test_wrong_configs_are_refused(shelf, tmp_path):
  about = json.loads((shelf / "config.json").read_text())
  model = about["model"]
  cases = {
    "has shape": {"model": model | {"mlp_width": 128}},
    "missing": {"model": model | {"blocks": 2}},
    "no setting 'widht' (nearest: width)": {"model": model | {"widht": 3}},
    "model.heads = 5 does not divide": {"model": model | {"heads": 5}},
    "unknown key 'stepp' (nearest: step)": {"stepp": 3},
    "step is missing": {"step": None},
    "files is missing or of the wrong type": {"files": [1]},
    "files has a bad entry '../x'": {"files": {"../x": {}}},
    "format_version 2, this ldm_jax reads 1": {"format_version": 2},
    "its format is not ldm_jax": {"format": "pt"},
    "train.compute_dtype: expected one of": {"compute_dtype": "float8"},
  }
  for number, (message, changes) in enumerate(cases.items()):
    folder = shutil.copytree(shelf, tmp_path / str(number))
    _edit(folder, **changes)
    assert message in _refusal(folder)
  assert "is no exported model" in _refusal(tmp_path / "nothing")
  with pytest.raises(InputError, match="no run there"):
    load_trained(tmp_path / "nothing")


# --- writing ---


def test_a_failed_export_leaves_nothing_and_keeps_the_old_one(tmp_path, small, shelf, monkeypatch):
  output, calls = tmp_path / "out", []

  def full_disk(arrays, path, metadata):
    calls.append(path)
    assert path.parent != output
    if len(calls) % 2 == 0:
      raise OSError(errno.ENOSPC, "No space left on device")
    save_file(arrays, path, metadata)

  monkeypatch.setattr(export, "save_file", full_disk)
  with pytest.raises(TrainingError, match=r"out: cannot write there: No space left"):
    save_exported(output, small, None, shard_bytes=LIMIT)
  assert not list(tmp_path.iterdir())
  shutil.copytree(shelf, output)
  with pytest.raises(TrainingError, match="No space left"):
    save_exported(output, small, None, shard_bytes=LIMIT, overwrite=True)
  monkeypatch.setattr(export, "save_file", save_file)
  rename = Path.rename

  def refused(path, target):
    if path.name == "new":
      raise OSError(errno.EIO, "Input/output error")
    return rename(path, target)

  monkeypatch.setattr(Path, "rename", refused)
  with pytest.raises(TrainingError, match="Input/output error"):
    save_exported(output, small, None, overwrite=True)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  assert load_exported(output, ONE).step == 7


def test_two_exports_to_one_folder_do_not_mix(tmp_path, small, monkeypatch):
  output, others = tmp_path / "out", [dataclasses.replace(small, step=9)]

  def meanwhile(arrays, path, metadata):
    if others:
      save_exported(output, others.pop(), None)
    save_file(arrays, path, metadata)

  monkeypatch.setattr(export, "save_file", meanwhile)
  with pytest.raises(TrainingError, match="out: cannot write there: Directory not empty"):
    save_exported(output, small, None, shard_bytes=LIMIT)
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  assert load_exported(output, ONE).step == 9


def test_only_an_export_is_overwritten(tmp_path, small):
  output = tmp_path / "out"
  output.mkdir()
  save_exported(output, small, None)
  with pytest.raises(InputError, match="not empty; choose another, or add --overwrite"):
    save_exported(output, small, None)
  for other in (".out.tmp", ".out.old"):  # somebody's own
    (tmp_path / other).mkdir()
  later = dataclasses.replace(small, step=9)
  save_exported(output, later, None, shard_bytes=LIMIT, overwrite=True)
  assert load_exported(output, ONE).step == 9
  assert not (output / "model.safetensors").exists()
  (output / "notes.md").write_text("mine")
  with pytest.raises(InputError, match=r"holds more than an export, such as notes\.md"):
    save_exported(output, small, None, overwrite=True)
  assert (output / "notes.md").read_text() == "mine"
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "thesis.tex").touch()
  with pytest.raises(InputError, match="something else than an export"):
    save_exported(tmp_path / "mine", small, None, overwrite=True)
  with pytest.raises(InputError, match=r"thesis\.tex is a file; give a folder"):
    save_exported(tmp_path / "mine" / "thesis.tex", small, None)
  with pytest.raises(InputError, match="folder on a disk"):
    save_exported("gs://bucket/out", small, None)
  assert sorted(path.name for path in tmp_path.iterdir()) == [".out.old", ".out.tmp", "mine", "out"]


def test_tokenizers_come_along(tmp_path, small, shelf):
  assert read_exported_tokenizer(shelf).kind == "bytes"
  library = _words()
  tokenizer = HuggingFaceTokenizer(library.to_str(), "<end>")
  folder = tmp_path / "out"
  save_exported(folder, small, tokenizer)
  loaded = read_exported_tokenizer(folder)
  assert (loaded.boundary, loaded.sha256) == (4, tokenizer.sha256)
  np.testing.assert_array_equal(loaded.encode("moon sun"), [3, 2])
  assert load_exported(folder, ONE).config.data.source == "synthetic"
  (folder / "tokenizer.json").write_text(library.to_str() + " ")
  with pytest.raises(InputError, match=r"tokenizer.json has"):
    read_exported_tokenizer(folder)
  few = dataclasses.replace(small, config=with_model(SMALL, vocab_size=4))
  with pytest.raises(InputError, match="5 ids and the model 4"):
    save_exported(tmp_path / "few", few, tokenizer)


def _words():
  words = {"<eos>": 0, "[UNK]": 1, "sun": 2, "moon": 3, "<end>": 4}
  library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
  library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  return library


# --- the command ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A workdir with checkpoints of steps 2 and 5 and a best one, trained on prepared data."""
  folder = tmp_path_factory.mktemp("run")
  for number in range(20):
    (folder / f"{number}.txt").write_text(f"text {number}")
  prepare(["--input", f"{folder}/*.txt", "--output", f"{folder}/data", "--held-out-one-in", "3"])
  data = DataConfig(source="prepared", path=f"{folder}/data", sequence_length=32, batch_size=8)
  config = dataclasses.replace(SMALL, data=data)
  (folder / "run").mkdir()
  save_config(folder / "run", config)
  trained, params = _trained(config), {}
  for part, steps in (("checkpoints", (2, 5)), ("best", (3,))):
    checkpointer = Checkpointer(folder / "run", 3, part)
    for step in steps:
      params[step] = jax.tree.map(lambda leaf, step=step: step * leaf, trained.params)
      checkpointer.save(TrainState(jnp.int32(step), params[step], {}), {"tokens": 0})
    checkpointer.close()
  return folder, params


@pytest.mark.parametrize(
  ("options", "step"), [((), 5), (("--step", "2", "--shard-gib", "2e-5"), 2), (("--best",), 3)]
)
def test_the_command_exports_the_step_that_was_asked_for(run, tmp_path, options, step, capsys):
  folder, params = run
  assert main(["--workdir", f"{folder}/run", "--output", f"{tmp_path}/out", *options]) == 0
  assert f"exported step {step} of" in capsys.readouterr().out
  loaded = load_exported(tmp_path / "out", ONE)
  assert loaded.step == step
  chex.assert_trees_all_equal(loaded.params, params[step])
  assert str(folder) not in (tmp_path / "out" / "config.json").read_text()


def test_the_command_says_what_is_wrong(run, tmp_path, shelf):
  folder, _ = run
  out = ["--output", f"{tmp_path}/out"]
  cases = {
    "no run there": ["--workdir", f"{tmp_path}/none", *out],
    "is an export; give the workdir": ["--workdir", str(shelf), *out],
    "step 4 is not in checkpoints": ["--workdir", f"{folder}/run", "--step", "4", *out],
    "moved is not a prepared data set": [
      *("--workdir", f"{folder}/run", "--data", f"{tmp_path}/moved", *out)
    ],
    "not empty": ["--workdir", f"{folder}/run", "--output", str(shelf)],
  }
  for message, arguments in cases.items():
    with pytest.raises(InputError, match=message):
      main(arguments)
  assert not list(tmp_path.iterdir())
  assert not is_export(folder / "run")
  _words().save(f"{tmp_path}/words.json")
  words = ["--tokenizer", f"{tmp_path}/words.json", "--boundary", "<end>", "--held-out-one-in", "3"]
  assert prepare(["--input", f"{folder}/*.txt", "--output", f"{tmp_path}/words", *words]) == 0
  with pytest.raises(InputError, match="was made with another tokenizer than the run"):
    main(["--workdir", f"{folder}/run", "--data", f"{tmp_path}/words", *out])
  shutil.copytree(folder / "data", tmp_path / "moved")
  assert main(["--workdir", f"{folder}/run", "--data", f"{tmp_path}/moved", *out]) == 0
