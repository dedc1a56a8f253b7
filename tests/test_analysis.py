"""The looks inside a model: exact against its own reads, the memory's closed form, and by hand."""

import contextlib
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.analysis import __main__ as command
from ldm_jax.analysis import analyse, measure
from ldm_jax.analysis.capture import capture
from ldm_jax.analysis.figures import draw
from ldm_jax.analysis.memory import (
  condition_number,
  effective_rank,
  key_cosines,
  recall_error,
)
from ldm_jax.analysis.mixing import weighted_sum
from ldm_jax.analysis.replay import replay
from ldm_jax.analysis.report import as_json
from ldm_jax.data import load_dataset
from ldm_jax.data.packing import Batch
from ldm_jax.errors import InputError
from ldm_jax.ops import depth_memory as dm
from ldm_jax.sharding import make_mesh
from ldm_jax.trained import load_trained
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import (
  abstract_state,
  compile_train_step,
  make_eval_step,
  make_model,
  put_batch,
)
from ldm_jax.training.workdir import save_config
from tests.rig import VARIANTS, with_kind, with_model

TRAINED = with_kind("rls")
TOKENS = 8  # one number everywhere: operations are compiled once for it


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """A run of twelve steps from random numbers, saved twice."""
  workdir, mesh = tmp_path_factory.mktemp("run"), one_device()
  save_config(workdir, TRAINED)
  dataset, checkpointer = load_dataset(TRAINED), Checkpointer(workdir, 2)
  abstract = abstract_state(TRAINED, mesh)
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)
  state = state.replace(
    params=jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding), random_model(TRAINED)[1], abstract.params
    )
  )
  with jax.set_mesh(mesh):
    step = compile_train_step(TRAINED, state, put_batch(mesh, dataset.train_batch(0)))
    for number in range(12):
      state, _ = step(state, put_batch(mesh, dataset.train_batch(number)))
      if number in (5, 11):
        checkpointer.save(state, {"tokens": 0})
  checkpointer.close()
  return workdir


@pytest.fixture(scope="module")
def trained(workdir):
  return load_trained(workdir, mesh=one_device())


@pytest.fixture(scope="module")
def ran(workdir, tmp_path_factory):
  """The command, run once: its folder, what it printed, the analysis, and what was captured."""
  out, printed, kept = tmp_path_factory.mktemp("figures"), io.StringIO(), []
  (out / "mine.txt").write_text("stays")
  (out / "keys.png").write_text("is replaced")

  def keeping(function):
    def kept_too(*args):
      kept.append((function(*args), args))
      return kept[-1][0]

    return kept_too

  arguments = ["--workdir", str(workdir), "--out", str(out), "--tokens", str(TOKENS)]
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
    patch.setattr(measure, "_look", keeping(measure._look))
    patch.setattr(command, "analyse", keeping(command.analyse))
    assert command.main([*arguments, "--rows", "3"]) == 0
  (_, (model, params, captured)), (analysis, _) = kept
  return (
    out,
    printed.getvalue(),
    analysis,
    (list(replay(model, params, captured.sources)), captured),
  )


@pytest.fixture(scope="module")
def analysis(ran):
  return ran[2]


@pytest.fixture(scope="module")
def looked(ran):
  """The reads of the trained model at the same tokens: moments, captured."""
  return ran[3]


def one_device():
  return make_mesh(TRAINED.mesh, jax.devices()[:1])


def random_batch(rows=2, length=16):
  rng = np.random.default_rng(0)
  tokens, targets = rng.integers(0, 257, (2, rows, length)).astype(np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  return Batch(tokens, targets, positions, np.ones_like(tokens), np.ones(tokens.shape, bool))


def random_model(config):
  """Nothing is zero, so that every gate is open and every query says something."""
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype),
    abstract_state(config, one_device()).params,
  )
  return make_model(config), params


def look_at(model, params, batch):
  tokens = np.linspace(0, batch.tokens.size - 1, TOKENS).astype(np.int32)
  seen, _ = jax.jit(lambda *args: capture(model, *args))(params, batch, tokens)
  return list(replay(model, params, seen.sources)), seen


def check_reads(moments, seen, tolerance=1e-4):
  assert [moment.index for moment in moments] == list(range(len(seen.reads)))
  for moment, read in zip(moments, np.asarray(seen.reads, np.float32), strict=True):
    found = weighted_sum(moment.weights, seen.sources)
    np.testing.assert_allclose(found, read, atol=tolerance * np.abs(read).max(), rtol=0)
    later = moment.weights[..., moment.index + 1 :]
    np.testing.assert_array_equal(later, np.zeros_like(later))


# What a read is made of


@pytest.mark.parametrize("name", ["preln", "attnres", "hc"])
def test_the_weights_of_the_sources_make_up_what_the_model_reads(name):
  config = with_kind(name, remat="full" if name == "attnres" else "none")
  looked = look_at(*random_model(config), random_batch())
  check_reads(*looked)
  last = looked[0][-1].weights
  if name == "preln":
    np.testing.assert_array_equal(last, np.ones_like(last))
  if name == "attnres":  # blocks of two
    np.testing.assert_allclose(np.ptp(last[..., 1:3], axis=-1), 0)
    np.testing.assert_allclose(last[..., (0, 1, 3)].sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"preln", "attnres", "hc"}))
def test_the_weights_of_every_variant_make_up_what_the_model_reads(name):
  tolerance = 2e-2 if name == "bfloat16_memory" else 1e-4
  check_reads(*look_at(*random_model(with_kind(name)), random_batch()), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rls", "hc", "attnres"])
def test_weights_of_a_bfloat16_model_hold_to_its_rounding(name):
  config = with_kind(name, compute_dtype="bfloat16", remat="full")
  check_reads(*look_at(*random_model(config), random_batch()), 5e-2)


def test_a_trained_memory_reads_by_the_weights_of_depth_attention(looked, analysis):
  check_reads(*looked)
  moments = looked[0]
  writes = [moment.written[0] for moment in moments if moment.written]
  for moment in moments[1:]:
    keys, strength, forgetting = (
      jnp.stack([write[part] for write in writes[: moment.index]]) for part in range(3)
    )
    query, scale = moment.asked[0]
    w = dm.depth_weights(keys, query, moment.streams.P, forgetting, strength)[:, 0]
    added = 1 + scale[0][..., None] * jnp.moveaxis(w, 0, -1)
    found = moment.weights[..., 1 : moment.index + 1]
    np.testing.assert_allclose(found, added, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(moment.weights[..., 0], np.ones((TOKENS, 4)))
    means = analysis.memory.weights[moment.index]
    np.testing.assert_allclose(means[: moment.index], w.mean(axis=1), atol=1e-4)
    assert np.isnan(means[moment.index :]).all()


def test_means_over_tokens(looked, analysis):
  moments, seen = looked
  assert analysis.tokens == TOKENS
  mixing, last = analysis.mixing, np.asarray(moments[-1].weights)
  np.testing.assert_allclose(mixing.weights[-1], np.mean(last, axis=0).T, atol=1e-4)
  np.testing.assert_allclose(mixing.magnitudes[-1], np.mean(np.abs(last), axis=0).T, atol=1e-4)
  np.testing.assert_allclose(np.nansum(mixing.shares, axis=1), 1.0, atol=1e-5)
  assert np.all(mixing.read_error < 1e-5)
  parts = np.einsum("ngs,sngv->sngv", last, seen.sources.reshape(5, TOKENS, 4, -1))
  read = np.asarray(seen.reads[-1]).reshape(TOKENS, 4, -1)
  along = np.einsum("sngv,ngv->sn", parts, read) / np.sum(read**2, axis=(1, 2))
  np.testing.assert_allclose(mixing.shares[-1], along.mean(axis=1), atol=1e-4)
  upper = np.triu_indices(5, 1)
  assert np.isnan(mixing.weights[upper]).all()
  assert not np.isnan(mixing.weights[np.tril_indices(5)]).any()
  rms = [float(np.sqrt(np.mean(np.square(v)))) for v in seen.outputs]
  np.testing.assert_allclose(analysis.depth["output_rms"], rms, rtol=0.5)  # of all tokens


@pytest.mark.slow
def test_a_mesh_of_four_devices_and_the_loss_of_the_run(workdir):
  batch = command.held_out_rows(TRAINED, 4)
  found = []
  for count in (1, 4):
    mesh = make_mesh(TRAINED.mesh, jax.devices()[:count])
    trained = load_trained(workdir, mesh=mesh)
    found.append(analyse(trained.model, trained.params, batch, TOKENS, mesh=mesh))
  alone, together = (dict(as_json(one), reads=[], sources=[]) for one in found)
  del alone["mixing"]["read_error"], together["mixing"]["read_error"]
  near = lambda x, y: isinstance(x, str) or np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
  jax.tree.map(near, alone, together)
  with jax.set_mesh(trained.mesh):
    sums = jax.jit(make_eval_step(TRAINED))(trained.params, put_batch(trained.mesh, batch))
  np.testing.assert_allclose(found[0].loss, sums.cross_entropy / sums.tokens, rtol=1e-5)


# The memory


def test_effective_rank_and_condition_number_by_hand():
  ranks = [effective_rank(np.diag(np.float64(d))) for d in ([3, 3, 3], [5, 0, 0], [2, 2, 0])]
  np.testing.assert_allclose(ranks, [3, 1, 2], rtol=1e-6)
  p = np.array([0.5, 0.25, 0.25])
  turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
  rank = effective_rank(turn @ np.diag(4 * p) @ turn.T)
  np.testing.assert_allclose(rank, np.exp(-np.sum(p * np.log(p))), rtol=1e-6)
  assert effective_rank(np.zeros((2, 2))) == 0
  conditions = condition_number(np.stack([np.diag([4.0, 2.0, 0.5]), np.eye(3), np.zeros((3, 3))]))
  np.testing.assert_allclose(conditions, [8, 1, np.inf])


def test_cosines_by_hand():
  keys = jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [-1.0, -1.0], [0.0, 0.0]])[:, None]
  root = np.sqrt(0.5)
  expected = [
    [1, 0, 1, -root, 0],
    [0, 1, 0, -root, 0],
    [1, 0, 1, -root, 0],
    [-root, -root, -root, 1, 0],
    [0, 0, 0, 0, 0],
  ]
  np.testing.assert_allclose(key_cosines(keys)[..., 0], expected, atol=1e-6)


@pytest.mark.parametrize("importance", [0.25, 4.0])
def test_recall_is_perfect_for_orthogonal_keys_without_a_ridge(importance):
  keys, values = jnp.eye(4)[:3], jax.random.normal(jax.random.key(0), (3, 5))

  def errors(alpha):
    M, P = dm.rls_init((), None, 5, 4, alpha)
    for key, value in zip(keys, values, strict=True):
      M, P = dm.rls_write(M, P, key, value, 1.0, importance)
    return [recall_error(M, key, value) for key, value in zip(keys, values, strict=True)]

  np.testing.assert_allclose(errors(1e6), 0, atol=1e-4)
  np.testing.assert_allclose(errors(1.0), 1 / (1 + importance), rtol=1e-5)


def test_the_memory_is_the_ridge_solution_of_what_was_written(looked, analysis):
  (moments, seen), found = looked, analysis.memory
  written = [moment.written[0] for moment in moments if moment.written]
  keys, strength, forgetting = (jnp.stack([write[part] for write in written]) for part in range(3))
  keys, strength = keys[:, 0], strength[:, 0]
  values = seen.outputs.reshape(4, -1, 4, 8)
  np.testing.assert_allclose(found.forgetting, forgetting, rtol=1e-6)
  np.testing.assert_allclose(found.strength, np.mean(strength, axis=1), rtol=1e-4)
  np.testing.assert_allclose(found.strength_deviation, np.std(strength, axis=1), atol=1e-4)
  np.testing.assert_allclose(
    found.key_cosine, np.einsum("ingk,jngk->ijng", keys, keys).mean(axis=2), atol=1e-4
  )
  forgetting = np.asarray(forgetting)
  for read in range(1, 5):
    parts = keys[:read], values[:read], forgetting[:read], strength[:read]
    M = dm.ridge_solution(*parts)
    missed = np.linalg.norm(jnp.einsum("ngvk,lngk->lngv", M, keys[:read]) - values[:read], axis=-1)
    errors = (missed / np.linalg.norm(values[:read], axis=-1)).mean(axis=1)
    np.testing.assert_allclose(found.recall_error[read, :read], errors, rtol=1e-3)
    later = np.array([np.prod(forgetting[i + 1 : read], axis=0) for i in range(read)])
    gram = np.einsum("lg,lng,lngi,lngj->ngij", later, strength[:read], keys[:read], keys[:read])
    total = np.prod(forgetting[:read], axis=0)
    P = np.linalg.inv(gram + total[:, None, None] * np.eye(3))
    eigenvalues = np.linalg.eigvalsh(P)
    condition = np.median(eigenvalues[..., -1] / eigenvalues[..., 0], axis=0)
    np.testing.assert_allclose(found.condition_number[read], condition, rtol=1e-3)
    np.testing.assert_allclose(
      found.covariance_rank[read], effective_rank(P).mean(axis=0), rtol=1e-3
    )
    np.testing.assert_allclose(found.key_rank[read], effective_rank(gram).mean(axis=0), rtol=1e-2)
  assert np.isnan(found.recall_error[0]).all()


def test_gates_and_gains_are_those_of_the_reads(looked, analysis):
  found = analysis.memory
  for moment in looked[0][1:]:
    scale = np.mean(moment.asked[0][1], axis=(0, 1))
    product = found.gain[moment.index] * found.gate[moment.index]
    np.testing.assert_allclose(product, scale, rtol=1e-3)
  assert np.isnan(found.gain[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "preln",
    "attnres",
    "hc",
    "delta",
    "outer",
    "memory_only_embedding",
    "block_writes",
    "one_group",
  ],
)
def test_every_kind_of_mixer_is_measured_and_drawn(name, tmp_path):
  model, params = random_model(with_kind(name))
  found = analyse(model, params, random_batch(), 16)
  json.dumps(as_json(found), allow_nan=False)
  for file, figure in draw(found):
    figure.savefig(tmp_path / file)
  memory = VARIANTS[name].kind == "ldm"
  assert (found.memory is not None) == memory == (tmp_path / "keys.png").exists()
  expected = {"memory_only_embedding": (0, 1, 2, 3, 4), "block_writes": (2, 4)}
  assert found.writes == expected.get(name, (1, 2, 3, 4) if memory else ())
  if memory:
    assert np.isnan(found.memory.condition_number).all() == (name in ("delta", "outer"))


# The command


def test_the_command_writes_what_the_function_returns(ran):
  out, printed, analysis, _ = ran
  found = json.loads((out / "analysis.json").read_text())
  assert found["checkpoint"] == {"folder": "checkpoints", "step": 12}
  assert found["writes"] == [1, 2, 3, 4]
  assert found["reads"] == ["A0", "M0", "A1", "M1", "head"]
  for part in ("mixing", "memory"):
    for name, array in getattr(analysis, part)._asdict().items():
      values = np.array(found[part][name], float)  # None becomes NaN
      np.testing.assert_array_equal(values, array, err_msg=name)
  assert found["depth"] == analysis.depth
  figures = {path.name for path in out.glob("*.png")}
  assert figures == {
    f"{name}.png"
    for name in (
      "mixing",
      "sizes",
      "depth_weights",
      "depth_weights_by_group",
      "controls",
      "keys",
      "recall",
    )
  }
  assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in figures)
  assert (out / "mine.txt").read_text() == "stays"
  assert "the head draws on" in printed
  assert "condition number of P" in printed


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"--workdir": "nowhere"}, r"--workdir nowhere: no run there, config\.json is missing"),
    ({"--step": "7"}, r"step 7 is not in checkpoints, which holds steps 6, 12"),
    ({"--best": None}, "no folder best"),
    (
      {"--rows": "1000000"},
      r"--rows 1000000: the data have \d+ held-out rows; set --rows to at most",
    ),
    ({"--rows": "0"}, "--rows must be at least 1, got 0"),
    ({"--seed": "-1"}, "--seed must be at least 0, got -1"),
    ({"--out": "x" * 300}, "--out x.*: File name too long"),
    ({"--tokens": "-1"}, "--tokens must be at least 1, got -1"),
    ({"--out": "FILE"}, r"--out .*: .*config\.json is a file; give a folder"),
    ({"--out": "gs://bucket/figures"}, "figures are kept on disks, not in buckets"),
    ({"--row": "3"}, r"unrecognized arguments: --row 3; python -m ldm_jax\.analysis --help"),
  ],
)
def test_refusals_leave_nothing_behind(workdir, tmp_path, monkeypatch, changes, message):
  monkeypatch.chdir(tmp_path)
  options = {"--workdir": str(workdir), "--out": "figures", **changes}
  if options["--out"] == "FILE":
    options["--out"] = str(workdir / "config.json" / "figures")
  argv = [word for pair in options.items() for word in pair if word is not None]
  with pytest.raises(InputError, match=message):
    command.main(argv)
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_memory_that_nothing_is_written_to_has_no_inside():
  config = with_kind("rls")
  mixer = dataclasses.replace(config.model.mixer, write_every=9)
  found = analyse(*random_model(with_model(config, mixer=mixer)), random_batch(), 8)
  assert found.memory is None
  np.testing.assert_array_equal(found.mixing.weights[-1], np.ones((5, 4)))


def test_rows_without_a_real_token_are_refused():
  empty = random_batch()._replace(loss_mask=np.zeros((2, 16), bool))
  with pytest.raises(InputError, match="no real token"):
    analyse(make_model(TRAINED), {}, empty)
