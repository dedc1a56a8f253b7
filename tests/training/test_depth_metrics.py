"""Depth metrics against an explicit loop over sublayers, for every mixer, rematerialised or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.data.packing import Batch
from ldm_jax.layers import Attention, Embedder, SwiGLU, dropout, rms_norm
from ldm_jax.mixers import make_mixer
from ldm_jax.sharding import make_mesh
from ldm_jax.training.depth_metrics import (
  DepthSums,
  compile_depth_step,
  depth_values,
  make_depth_step,
)
from ldm_jax.training.metrics import _scalars
from ldm_jax.training.step import StepMetrics, TrainState, abstract_state, dropout_keys, loss_sums
from tests.rig import MECHANISMS, with_kind, with_model


def small_config(name, **train):
  """One block, and targets of which two thirds are real."""
  return with_model(with_kind(name, **train), blocks=1, width=16, mlp_width=24)


def random_batch(config):
  rng = np.random.default_rng(0)
  shape = (config.data.batch_size, config.data.sequence_length)
  tokens, targets = rng.integers(0, 257, (2, *shape)).astype(np.int32)
  positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
  segments = 1 + (positions > 20).astype(np.int32)
  mask = rng.random(shape) < 0.67
  return jax.tree.map(jnp.asarray, Batch(tokens, targets, positions, segments, mask))


def random_params(config, mesh):
  """Nothing is zero, so that every gate is open and every query says something."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(0.0, 0.3, leaf.shape), leaf.dtype),
    abstract_state(config, mesh).params,
  )


def explicit_loop(config, params, batch, perturbations, step):
  """Mean loss with something added to each v, and every sublayer's streams and output."""
  model, dtype, seen = config.model, jnp.float32, []
  embedder = Embedder(model.vocab_size, model.padded_vocab_size, model.width, False, dtype)
  sublayers = [
    (Attention(model.heads, model.heads, False, model.rope_theta, dtype), "attention"),
    (SwiGLU(model.mlp_width, dtype), "mlp"),
  ]

  keys = dropout_keys(config, jnp.int32(step))

  def dropped(x, place):
    return dropout(x, model.dropout, keys, place)

  def apply(module, name, *args, of=params, **kwargs):
    return module.apply({"params": of.get(name, {})}, *args, **kwargs)

  x = dropped(apply(embedder, "embedder", batch.tokens, method="encode"), 0)
  block = params["block_0"]
  last = make_mixer(model.mixer, 2, 2, dtype, None)
  streams = last.apply({}, x, method="init_streams")
  for index, (module, part) in enumerate(sublayers):
    mixer = make_mixer(model.mixer, index, 2, dtype, None)
    rest = (batch.positions, batch.segment_ids) if part == "attention" else ()
    read = apply(mixer, f"{part}_mixer", streams, of=block, method="read")
    h = apply(rms_norm(dtype, "norm"), f"{part}_norm", read, of=block)
    v = dropped(apply(module, part, h, *rest, of=block), index + 1) + perturbations[index]
    seen.append((streams, v))
    streams = apply(mixer, f"{part}_mixer", streams, v, of=block, method="write")
  y = apply(last, "output_mixer", streams, method="read")
  y = apply(rms_norm(dtype, "norm"), "final_norm", y)
  sums = loss_sums(apply(embedder, "embedder", y, method="decode"), batch.targets, batch.loss_mask)
  return sums.cross_entropy / sums.tokens, [*seen, (streams, None)]


def rms(x):
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def streams_by_name(name, streams):
  if name == "rls":
    return {"x": streams.x, "M": streams.memory_matrix(), "P": streams.P}
  named = {f"sources/{index}": source for index, source in enumerate(streams.sources)}
  return named | ({} if streams.partial is None else {"partial": streams.partial})


@pytest.mark.parametrize(
  ("name", "remat", "accumulate", "rate"), [("rls", "full", 1, 0.0), ("attnres", "none", 2, 0.2)]
)
def test_the_numbers_are_those_of_an_explicit_loop(name, remat, accumulate, rate):
  config = with_model(small_config(name, remat=remat, accumulate=accumulate), dropout=rate)
  mesh, batch = make_mesh(config.mesh, jax.devices()[:1]), random_batch(config)
  with jax.set_mesh(mesh):
    params = random_params(config, mesh)
    state = TrainState(jnp.int32(7), params, None)
    sums = compile_depth_step(config, mesh, state, batch)(state, batch)
  fake = StepMetrics(0.0, 0.0, 0, np.ones(len(jax.tree.leaves(params))), None)
  values = depth_values(jax.device_get(sums), fake, params)

  zeros = jnp.zeros((2, *batch.tokens.shape, config.model.width))
  loss = lambda zeros: explicit_loop(config, params, batch, zeros, step=7)
  gradients, seen = jax.jit(jax.grad(loss, has_aux=True))(zeros)
  norms = [float(np.linalg.norm(gradient)) for gradient in gradients]
  np.testing.assert_allclose(values["output_gradient_norm"], norms, rtol=1e-5)
  np.testing.assert_allclose(values["output_rms"], [rms(v) for _, v in seen[:-1]], rtol=1e-5)
  for index, (streams, _) in enumerate(seen):
    expected = streams_by_name(name, streams)
    found = {key: numbers[index] for key, numbers in values["stream_rms"].items()}
    assert {key for key, number in found.items() if number is not None} - expected.keys() <= {
      f"reads/0/{leaf}" for leaf in ("mean", "log_weight", "query")
    }
    for key, array in expected.items():
      np.testing.assert_allclose(found[key], rms(array), rtol=1e-5, err_msg=f"{key} at {index}")


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mixer_names_its_streams_also_when_rematerialised(name):
  config = small_config(name, remat="full")
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  sums = jax.eval_shape(make_depth_step(config), abstract_state(config, mesh), random_batch(config))
  assert sums.outputs.shape == sums.gradients.shape == (2,)
  expected = {
    "preln": {"x"},
    "rls": {"x", "M", "P"},
    "attnres": {"sources/0"},
    "hc": {"X/0", "X/1", "X/2"},
    "mhc": {"X/0", "X/1", "X/2"},
  }[name]
  assert len(sums.streams) == 3
  assert set(sums.streams[0]) == expected
  assert set(sums.streams[2]) == expected | ({"sources/1"} if name == "attnres" else set())


def test_gradients_of_parameters_are_joined_by_part_of_the_model():
  params = {"block_0": {"a": 0, "b": 0}, "embedder": {"c": 0}}
  metrics = StepMetrics(0.0, 0.0, 0, np.array([3.0, 4.0, 2.0]), None)
  sums = jax.tree.map(np.float32, make_sums())
  values = depth_values(sums, metrics, params)
  assert values["parameter_gradient_norm"] == {"block_0": 5.0, "embedder": 2.0}
  assert values["stream_rms"] == {"x": [2.0, 3.0], "y": [None, 1.0]}
  assert values["output_gradient_norm"] == [0.5]
  assert list(_scalars("depth", {"step": 1, **values})) == [
    ("depth/step", 1),
    ("depth/stream_rms/x/0", 2.0),
    ("depth/stream_rms/x/1", 3.0),
    ("depth/stream_rms/y/1", 1.0),
    ("depth/output_rms/0", 1.0),
    ("depth/output_gradient_norm/0", 0.5),
    ("depth/parameter_gradient_norm/block_0", 5.0),
    ("depth/parameter_gradient_norm/embedder", 2.0),
  ]
  assert [tag for tag, _ in _scalars("x", [0.0] * 11)][::10] == ["x/00", "x/10"]


def make_sums():
  streams = ({"x": 4.0}, {"x": 9.0, "y": 1.0})
  return DepthSums(streams, np.ones(1), np.full(1, 4.0), 4)
