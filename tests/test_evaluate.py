"""Losses of a run: what training logged, whole sets, positions, documents, other data."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from ldm_jax.config import MeshConfig
from ldm_jax.data import load_dataset
from ldm_jax.data.prepare import main as prepare
from ldm_jax.errors import InputError
from ldm_jax.evaluate import evaluate_run, main
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import load_trained
from ldm_jax.training import loop
from tests.rig import save_run, tiny_config, trace, with_model, with_section

TEXTS = [f"document {'x' * n} number {n}" for n in range(24)]


def prepared(folder, *options):
  (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
  output = folder / "data"
  arguments = ["--input", str(folder / "texts.jsonl"), "--output", str(output)]
  assert prepare([*arguments, "--held-out-one-in", "3", *options]) == 0
  return output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run on documents of its own, with one evaluation at its end."""
  folder = tmp_path_factory.mktemp("evaluate")
  config = with_model(tiny_config("preln", steps=1, eval_batches=2, keep_best=True), blocks=1)
  data = dict(source="prepared", path=str(prepared(folder)), batch_size=8)
  config = with_section(config, "data", **data)
  assert loop.train(config, folder / "run") == 0
  return folder / "run", config


def result_of(capsys, *arguments):
  capsys.readouterr()
  assert main([*map(str, arguments), "--json"]) == 0
  return json.loads(capsys.readouterr().out)


def test_the_loss_is_the_one_that_training_logged(run, capsys):
  workdir, _ = run
  (logged,) = (line for line in trace(workdir) if line["split"] == "eval")
  for options in ((), ("--best",), ("--step", 1)):
    found = result_of(capsys, "--workdir", workdir, "--batches", 2, *options)
    assert found["tokens"] == logged["tokens"]
    for key in ("loss", "bits_per_byte"):
      np.testing.assert_allclose(found[key], logged[key], rtol=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["step"] == 1


def test_positions_and_documents_add_up_to_the_whole(run, capsys, tmp_path):
  workdir, config = run
  output = tmp_path / "documents.jsonl"
  options = ["--per-position", "--per-document", "--output", output]
  found = result_of(capsys, "--workdir", workdir, *options)
  documents = [json.loads(line) for line in output.read_text().splitlines()]
  assert [line["document"] for line in documents] == list(range(len(documents)))
  held_out = load_dataset(config).held_out_rows
  assert found["tokens"] == held_out.pairs == sum(line["tokens"] for line in documents)
  total = found["loss"] * found["tokens"]
  assert sum(line["nats"] for line in documents) == pytest.approx(total)
  losses, tokens = found["per_position"].values()
  assert sum(tokens) == found["tokens"]
  assert sum(a * b for a, b in zip(losses, tokens, strict=True) if b) == pytest.approx(total)

  # Each document's sum, from one forward pass over the stream: rows of 32 cut it.
  stream = held_out._ids
  ids = stream[: len(stream)].astype(int)
  starts = [*np.flatnonzero(ids == 256)]
  assert [line["tokens"] for line in documents] == np.diff(starts).tolist()
  trained = load_trained(workdir)
  nats = np.zeros(len(ids) - 1)
  forward = jax.jit(lambda *row: trained.model.apply({"params": trained.params}, *row))
  for index in range(len(held_out)):
    row = held_out[index]
    logits = forward(*(jnp.asarray(x)[None] for x in (row.tokens, row.positions, row.segment_ids)))
    logs = jax.nn.log_softmax(logits[0])
    size = int(row.loss_mask.sum())
    own = -np.asarray(logs)[np.arange(size), row.targets[:size]]
    nats[32 * index : 32 * index + size] = own
  expected = [nats[a:b].sum() for a, b in itertools.pairwise(starts)]
  np.testing.assert_allclose([line["nats"] for line in documents], expected, rtol=1e-5)


def test_any_mesh_and_part_gives_the_same_loss(run, capsys):
  workdir, config = run
  whole = result_of(capsys, "--workdir", workdir)
  for shape in ((1, 1, 1, 1), (1, 2, 2, 2)):
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: math.prod(shape)])
    trained = load_trained(workdir, mesh=mesh)
    found, _ = evaluate_run(trained, load_dataset(config))
    assert found["tokens"] == whole["tokens"]
    np.testing.assert_allclose(found["loss"], whole["loss"], rtol=1e-5)
  train = result_of(capsys, "--workdir", workdir, "--part", "train")
  assert train["tokens"] == load_dataset(config).train_rows.pairs


def test_other_data_need_the_same_tokenizer_and_bits_are_per_byte_of_text(run, capsys, tmp_path):
  workdir, config = run
  (tmp_path / "same").mkdir()
  same = prepared(tmp_path / "same")
  assert result_of(capsys, "--workdir", workdir, "--data", same)["data"] == str(same)

  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=280,
    special_tokens=["<|endoftext|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXTS, trainer)
  tokenizer.save(str(tmp_path / "tok.json"))
  (tmp_path / "other").mkdir()
  other = prepared(tmp_path / "other", "--tokenizer", str(tmp_path / "tok.json"))
  with pytest.raises(InputError, match="another tokenizer than the run"):
    main(["--workdir", str(workdir), "--data", str(other)])

  config = with_section(with_model(config, vocab_size=280), "data", path=str(other))
  save_run(tmp_path / "run", config)
  found = result_of(capsys, "--workdir", tmp_path / "run")
  meta = json.loads((other / "meta.json").read_text())
  bits = found["loss"] * found["tokens"] / math.log(2)
  assert found["bits_per_byte"] == pytest.approx(bits / meta["text_bytes"]["held_out"])
  assert "bits_per_byte" not in result_of(capsys, "--workdir", tmp_path / "run", "--batches", 1)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (["--batches", "0"], "--batches 0"),
    (["--per-document"], "--output FILE"),
    (["--output", "x"], "--per-document and --output"),
    (["--per-document", "--output", "x", "--batches", "1"], "out of their order"),
    (["--step", "3"], "step 3 is not in checkpoints"),
    (["--data", "nowhere"], "nowhere is not a prepared data set"),
    (["--per-document", "--output", "/"], "--output / is a folder; give a file"),
    (["--per-document", "--output", f"{__file__}/x"], "--output .* is a file; give a folder"),
  ],
  ids=str,
)
def test_what_cannot_be_is_refused_by_its_option(run, options, message):
  with pytest.raises(InputError, match=message):
    main(["--workdir", str(run[0]), *options])
