"""The loss counts real targets only; the step is the same however the work is divided."""

import dataclasses
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ldm_jax.config import MeshConfig, OptimizerConfig
from ldm_jax.data.packing import Batch, empty_rows
from ldm_jax.layers import dropout
from ldm_jax.sharding import make_mesh
from ldm_jax.training.optimizer import decay_mask, learning_rate_schedule
from ldm_jax.training.step import (
  abstract_state,
  dropout_keys,
  init_state,
  loss_sums,
  make_eval_step,
  make_init,
  make_model,
  make_train_step,
)
from tests.rig import MECHANISMS, tiny_config, with_kind, with_model

ONE_DEVICE = make_mesh(MeshConfig(), jax.devices()[:1])


def random_batch(seed=0, rows=8, length=32, real=None):
  """Random rows of which row r has real[r] targets."""
  rng = np.random.default_rng(seed)
  tokens, targets = rng.integers(0, 257, (2, rows, length)).astype(np.int32)
  real = np.full(rows, length) if real is None else np.asarray(real)
  mask = np.arange(length) < real[:, None]
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), mask.shape)
  return Batch(tokens, targets, positions, mask.astype(np.int32), mask)


def run_step(config, batch, mesh=ONE_DEVICE, steps=1):
  step = jax.jit(make_train_step(config))
  with jax.set_mesh(mesh):
    state = init_state(config, mesh)
    for _ in range(steps):
      state, metrics = step(state, batch)
  return jax.device_get((state, metrics))


def test_loss_of_constant_logits_is_exact_and_ignores_padding_and_segment_numbers():
  logits = jnp.zeros((2, 3, 128)).at[..., 100:].set(-1e9)
  targets, mask = jnp.ones((2, 3), jnp.int32), jnp.array([[1, 1, 0], [0, 0, 0]], bool)
  sums = loss_sums(logits, targets, mask)
  assert sums.tokens == 2
  np.testing.assert_allclose(sums.cross_entropy / sums.tokens, np.log(100), rtol=1e-6)
  np.testing.assert_allclose(sums.squared_log_partition / 2, np.log(100) ** 2, rtol=1e-6)
  poisoned = loss_sums(logits.at[1].set(jnp.nan), targets, mask)
  chex.assert_trees_all_equal(poisoned, sums)


def test_a_batch_of_padding_changes_nothing_but_the_step_and_the_decay():
  config = dataclasses.replace(
    tiny_config(), optimizer=OptimizerConfig(weight_decay=0.0, warmup_steps=0)
  )
  state, metrics = run_step(config, empty_rows(8, 32))
  chex.assert_trees_all_equal(state.params, jax.device_get(init_state(config, ONE_DEVICE).params))
  assert (metrics.loss, metrics.grad_norm, metrics.tokens) == (0, 0, 0)


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=() if name == "rls" else pytest.mark.slow) for name in MECHANISMS],
)
def test_every_parameter_moves_within_three_steps(name):
  config = dataclasses.replace(
    with_kind(name), optimizer=OptimizerConfig(weight_decay=0.0, warmup_steps=0, learning_rate=1e-2)
  )
  batch = random_batch()
  start = jax.device_get(init_state(config, ONE_DEVICE))
  end, metrics = run_step(config, batch, steps=3)
  assert np.isfinite(metrics.loss)
  for (path, before), after in zip(
    jax.tree_util.tree_leaves_with_path(start.params), jax.tree.leaves(end.params), strict=True
  ):
    assert (before != after).any(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  ("kind", "z_loss"), [("preln", 1e-2), pytest.param("ldm", 0.0, marks=pytest.mark.slow)]
)
def test_accumulated_parts_weigh_their_real_tokens(kind, z_loss):
  config = tiny_config(kind)
  config = dataclasses.replace(
    config, optimizer=dataclasses.replace(config.optimizer, z_loss=z_loss)
  )
  batch = random_batch(real=[32, 1, 1, 1, 8, 0, 3, 1])
  whole = run_step(config, batch)
  for parts in (2, 8):
    train = dataclasses.replace(config.train, accumulate=parts)
    split = run_step(dataclasses.replace(config, train=train), batch)
    chex.assert_trees_all_close(split[1], whole[1], rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(
      split[0].optimizer_state, whole[0].optimizer_state, rtol=1e-3, atol=1e-7
    )


def test_dropout_is_new_in_every_step_and_the_same_however_the_work_is_divided():
  batch, config = random_batch(), with_model(tiny_config("preln"), dropout=0.3)
  whole = run_step(config, batch)
  plain = run_step(tiny_config("preln"), batch)
  assert abs(whole[1].loss - plain[1].loss) > 1e-4
  in_parts = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=4))
  eight = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  for other in (run_step(in_parts, batch), run_step(config, batch, eight)):
    chex.assert_trees_all_close(other[1], whole[1], rtol=1e-4, atol=1e-6)
  keys = [jax.random.key_data(dropout_keys(config, jnp.int32(step))) for step in (0, 1)]
  assert len(np.unique(np.concatenate(keys), axis=0)) == 16


def test_dropout_zeroes_its_fraction_and_keeps_the_mean():
  keys = jax.random.split(jax.random.key(0), 4)
  x = jnp.ones((4, 50, 100))
  dropped = dropout(x, 0.25, keys, 3)
  np.testing.assert_allclose(jnp.mean(dropped == 0), 0.25, atol=0.01)
  np.testing.assert_allclose(dropped[dropped != 0], 1 / 0.75, rtol=1e-6)
  assert (dropped != dropout(x, 0.25, keys, 4)).any()
  np.testing.assert_array_equal(dropped[1:2], dropout(x[1:2], 0.25, keys[1:2], 3))
  assert dropout(x, 0.25, None, 3) is x


def test_z_loss_and_clipping_change_the_step_but_not_the_reported_loss():
  batch, plain = random_batch(), tiny_config("preln")
  base = run_step(plain, batch)
  for changes in ({"z_loss": 0.1}, {"clip_norm": 1e-3}):
    config = dataclasses.replace(plain, optimizer=dataclasses.replace(plain.optimizer, **changes))
    state, metrics = run_step(config, batch)
    np.testing.assert_allclose(metrics.loss, base[1].loss, rtol=1e-6)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), state, base[0])
    assert max(jax.tree.leaves(moved.optimizer_state)) > 1e-6


def test_parameters_are_really_split_and_stay_so():
  mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
  config = tiny_config()
  with jax.set_mesh(mesh):
    state = init_state(config, mesh)
  up = state.params["block_0"]["mlp"]["up"]["kernel"]
  assert up.addressable_shards[0].data.shape == (32 // 4, 64 // 2)
  moments = state.optimizer_state[1][0].mu["block_0"]["mlp"]["up"]["kernel"]
  assert moments.sharding == up.sharding
  shapes = abstract_state(config, mesh)
  chex.assert_trees_all_equal_shapes_and_dtypes(shapes, state)
  assert jax.tree.map(lambda x: x.sharding, shapes) == jax.tree.map(lambda x: x.sharding, state)


def test_everything_trained_is_float32_also_with_bfloat16_compute():
  config = tiny_config(compute_dtype="bfloat16")
  state, metrics = run_step(config, random_batch())
  for leaf in jax.tree.leaves(state):
    assert leaf.dtype in (jnp.float32, jnp.int32)
  wide = run_step(tiny_config(), random_batch())[1]
  assert 0 < abs(metrics.loss - wide.loss) < 0.02


def test_a_frequent_token_keeps_its_gradient_in_bfloat16():
  ones = np.ones((8, 128), np.int32)
  batch = Batch(ones, 2 * ones, np.arange(128, dtype=np.int32)[None] + 0 * ones, ones, ones > 0)
  norms = {}
  for dtype in ("float32", "bfloat16"):
    config = tiny_config("preln", compute_dtype=dtype)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=128))
    state, _ = run_step(config, batch)
    norms[dtype] = np.linalg.norm(state.optimizer_state[1][0].mu["embedder"]["embedding"][1])
  np.testing.assert_allclose(norms["bfloat16"], norms["float32"], rtol=0.05)


def test_weight_decay_follows_the_role_of_a_parameter_not_its_rank():
  config = with_model(tiny_config(), qk_norm=True)
  params = nn.unbox(jax.eval_shape(make_init(config), jax.random.key(0))).params
  mask = {
    jax.tree_util.keystr(path, simple=True, separator="/"): decays
    for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(params))
  }
  block = "block_1/attention_mixer"
  assert mask["embedder/embedding"]
  assert mask["block_0/attention/query/kernel"]
  assert mask[f"{block}/write_controls/key_kernel"]
  for name in (
    "final_norm/scale",
    "block_0/attention/query_norm/scale",
    f"{block}/read_controls/gain",
    f"{block}/read_controls/query_kernel",
    f"{block}/read_controls/gate_kernel",
    f"{block}/write_controls/forgetting",
    f"{block}/write_controls/importance_kernel",
    f"{block}/write_controls/latent/latent_bias",
  ):
    assert not mask[name]
  with pytest.raises(ValueError, match="block/mystery has no weight-decay role"):
    decay_mask({"block": {"mystery": jnp.zeros(3)}})


@pytest.mark.parametrize("warmup", [0, 1, 10, 200])
def test_learning_rate_rises_to_the_peak_and_falls_to_the_final_fraction(warmup):
  config = OptimizerConfig(learning_rate=1e-2, warmup_steps=warmup, final_fraction=0.1)
  rates = np.array([learning_rate_schedule(config, 100)(step) for step in range(100)])
  assert (rates > 0).all()
  assert (np.diff(rates[:warmup]) > 0).all()
  if warmup < 100:
    np.testing.assert_allclose(rates[warmup], 1e-2, rtol=1e-5)
    assert (np.diff(rates[warmup:]) < 0).all()
    np.testing.assert_allclose(rates[-1], 1e-3, rtol=0.01)


def test_evaluation_counts_padding_rows_for_nothing():
  config = tiny_config()
  batch = random_batch(rows=5)
  params = init_state(config, ONE_DEVICE).params
  step = jax.jit(make_eval_step(config))
  padded = Batch(*(np.concatenate(p) for p in zip(batch, empty_rows(3, 32), strict=True)))
  rows = [step(params, Batch(*(a[i : i + 1] for a in batch))) for i in range(5)]
  total = jax.tree.map(lambda *x: sum(x), *rows)
  chex.assert_trees_all_close(step(params, padded), total, rtol=1e-5)


OVERFIT_BY_DEFAULT = [("rls", "full")]


@pytest.mark.parametrize(
  ("name", "remat"),
  [
    pytest.param(*case, marks=() if case in OVERFIT_BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(MECHANISMS, ("none", "full"))
  ],
)
def test_a_model_overfits_one_batch_of_64_tokens(name, remat):
  config = with_kind(name, remat=remat, steps=200)
  model, optimizer = make_model(config), optax.adam(1e-2)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 33)), jnp.int32)
  params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])["params"])

  @jax.jit
  def step(params, state):
    def loss(p):
      sums = loss_sums(
        model.apply({"params": p}, tokens[:, :-1]), tokens[:, 1:], tokens[:, 1:] >= 0
      )
      return sums.cross_entropy / sums.tokens

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value

  state = optimizer.init(params)
  for _ in range(120):
    params, state, value = step(params, state)
  assert value < 0.05
