"""The memory that the modules build is the regression over the outputs they wrote."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import LinearDepthMemory, PreLN
from ldm_jax.errors import InputError
from ldm_jax.ops import depth_memory as dm

B, T, D, G, K, SUBLAYERS = 2, 3, 16, 4, 3, 6


def run(rule="rls", **settings):
  """Writes random outputs through real modules with random parameters; records the controls."""
  mixers = [
    LinearDepthMemory(index, rule=rule, groups=G, key_dim=K, latent_dim=8, **settings)
    for index in range(SUBLAYERS)
  ]
  x, *outputs = jax.random.normal(jax.random.key(0), (SUBLAYERS + 1, B, T, D))
  streams, controls = mixers[0].init_streams(x), []
  for index, (mixer, v) in enumerate(zip(mixers, outputs, strict=True)):
    variables = nn.unbox(mixer.init(jax.random.key(index), streams, lambda h, v=v: v))
    variables = jax.tree.map(
      lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), variables
    )
    before, streams = streams, mixer.apply(variables, streams, v, method="write")
    controls.append(
      mixer.apply(variables, streams.x, method=lambda module, x: module.write_controls(x))
    )
    assert before.x is not streams.x
  keys, strengths, forgetting = zip(*controls, strict=True)
  values = jnp.stack(outputs).reshape(SUBLAYERS, B, T, G, D // G)
  return mixers[-1], variables, streams, jnp.stack(keys), values, strengths, forgetting


def test_rls_memory_is_the_ridge_solution_of_what_was_written():
  _, _, streams, k, v, importance, forgetting = run(alpha=2.0)
  expected = dm.ridge_solution(k, v, jnp.stack(forgetting), jnp.stack(importance), alpha=2.0)
  assert streams.memory_matrix().shape == (B, T, G, D // G, K)
  np.testing.assert_allclose(streams.memory_matrix(), expected, rtol=1e-3, atol=1e-4)


def test_outer_memory_is_the_sum_of_outer_products_and_has_no_P():
  _, _, streams, k, v, strengths, forgetting = run("outer")
  assert streams.P is None
  assert strengths == forgetting == (None,) * SUBLAYERS
  expected = jnp.einsum("lbtgv,lbtgk->btgvk", v, k)
  np.testing.assert_allclose(streams.memory_matrix(), expected, rtol=1e-4, atol=1e-5)


def test_delta_memory_follows_the_recurrence():
  _, _, streams, k, v, beta, _ = run("delta")
  M = jnp.zeros((B, T, G, D // G, K))
  for i in range(SUBLAYERS):
    M = dm.delta_write(M, k[i], v[i], beta[i])
  np.testing.assert_allclose(streams.memory_matrix(), M, rtol=1e-4, atol=1e-5)


def test_read_is_x_plus_scaled_query_of_each_group():
  mixer, variables, streams, *_ = run(gain_init=0.7)
  h = mixer.apply(variables, streams, method="read")
  q, scale = mixer.apply(variables, streams.x, method=lambda module, x: module.read_controls(x))
  np.testing.assert_allclose(jnp.linalg.norm(q, axis=-1), 1.0, rtol=1e-5)
  r = np.zeros((B, T, D))
  for g in range(G):
    slice_g = slice(g * D // G, (g + 1) * D // G)
    M_g = np.asarray(streams.memory_matrix()[:, :, g])
    r[..., slice_g] = scale[..., g, None] * np.einsum("btvk,btk->btv", M_g, q[:, :, g])
  np.testing.assert_allclose(h, streams.x + r, rtol=1e-4, atol=1e-5)


def test_memory_only_reads_M_q_and_no_residual_drops_the_sum():
  mixer, variables, streams, *_ = run(readout="memory_only", residual=False)
  h = mixer.apply(variables, streams, method="read")
  q, _ = mixer.apply(variables, streams.x, method=lambda module, x: module.read_controls(x))
  np.testing.assert_allclose(h, dm.read(streams.M, q).reshape(B, T, D), rtol=1e-5, atol=1e-6)
  v = jnp.full((B, T, D), 2.0)
  np.testing.assert_array_equal(mixer.apply(variables, streams, v, method="write").x, v)


def test_initial_values_of_the_controls():
  mixer = LinearDepthMemory(1, groups=G, key_dim=K, latent_dim=8, min_forgetting=0.6)
  x = jax.random.normal(jax.random.key(0), (B, T, D))
  streams = mixer.init_streams(x)
  variables = nn.unbox(mixer.init(jax.random.key(1), streams, lambda h: h))
  k, importance, forgetting = mixer.apply(
    variables, x, method=lambda module, x: module.write_controls(x)
  )
  np.testing.assert_allclose(jnp.linalg.norm(k, axis=-1), 1.0, rtol=1e-5)
  np.testing.assert_allclose(importance, 1.0, rtol=1e-6)
  np.testing.assert_allclose(forgetting, 0.98, rtol=1e-6)
  assert forgetting.shape == (G,)
  assert variables["params"]["read_controls"]["gain"].shape == (G,)
  assert not variables["params"]["read_controls"]["gain"].any()
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))


def test_a_large_key_bias_starts_reads_at_the_mean_of_the_outputs():
  x, *outputs = jax.random.normal(jax.random.key(0), (4, B, T, D))
  settings = dict(groups=G, key_dim=K, key_bias_init=1e3, readout="memory_only", forgetting=False)
  streams = LinearDepthMemory(0, **settings).init_streams(x)
  for index, v in enumerate(outputs):
    mixer = LinearDepthMemory(index, **settings)
    streams, _ = mixer.init_with_output(jax.random.key(index), streams, lambda h, v=v: v)
  mixer = LinearDepthMemory(3, **settings)
  variables = mixer.init(jax.random.key(3), streams, lambda h: h)
  h = mixer.apply(variables, streams, method="read")
  # Three writes under one key against a ridge of 1: their sum over 4.
  np.testing.assert_allclose(h, sum(outputs) / 4, rtol=1e-2, atol=1e-2)


def test_forgetting_never_falls_below_its_bound():
  mixer = LinearDepthMemory(1, groups=G, key_dim=K, min_forgetting=0.6)
  x = jnp.ones((B, T, D))
  variables = nn.unbox(mixer.init(jax.random.key(1), mixer.init_streams(x), lambda h: h))
  for theta, bound in ((-1e4, 0.6), (1e4, 1.0)):
    variables["params"]["write_controls"]["forgetting"] = jnp.full((G,), theta)
    *_, forgetting = mixer.apply(variables, x, method=lambda module, x: module.write_controls(x))
    np.testing.assert_allclose(forgetting, bound)


def test_gain_zero_is_preln_to_the_bit():
  x, v = jax.random.normal(jax.random.key(0), (2, B, T, D))
  for index in range(3):
    mixer = LinearDepthMemory(index, groups=G, key_dim=K)
    streams = mixer.init_streams(x)
    streams, variables = mixer.init_with_output(jax.random.key(1), streams, lambda h: v)
    plain = PreLN()
    np.testing.assert_array_equal(streams.x, plain.write(plain.init_streams(x), v).x)
    np.testing.assert_array_equal(mixer.apply(variables, streams, method="read"), streams.x)


def test_shared_key_gives_every_group_the_same_key():
  *_, k, _, _, _ = run(shared_key=True)
  np.testing.assert_array_equal(k, jnp.broadcast_to(k[..., :1, :], k.shape))
  *_, k, _, _, _ = run(shared_key=False)
  assert jnp.abs(k - k[..., :1, :]).max() > 0.1


def test_a_width_that_the_groups_do_not_divide_is_refused():
  with pytest.raises(InputError, match="width 16 is not divisible by groups = 5"):
    LinearDepthMemory(0, groups=5).init_streams(jnp.zeros((1, 1, 16)))
