"""Sinkhorn equals the plain iteration in float64, in value and gradient, and survives any logit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.ops.sinkhorn import sinkhorn
from tests.mixers import oracles


def test_sinkhorn_equals_the_plain_iteration():
  rng = np.random.default_rng(0)
  for shape, iterations in (((2, 3, 4, 4), 1), ((2, 3, 4, 4), 20), ((5, 2, 2), 3), ((8, 8), 20)):
    logits = 2 * rng.normal(size=shape).astype(np.float32)
    actual = sinkhorn(jnp.array(logits), iterations=iterations)
    desired = oracles.sinkhorn(np.float64(logits), iterations)
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_sinkhorn_is_doubly_stochastic(size):
  logits = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
  m = sinkhorn(jnp.array(logits), iterations=20)
  assert m.min() >= 0
  np.testing.assert_allclose(m.sum(axis=-1), 1, rtol=0, atol=1e-5)
  np.testing.assert_allclose(m.sum(axis=-2), 1, rtol=0, atol=1e-5)


def test_next_to_the_identity_columns_converge_slowly():
  logits = 6 * np.eye(4) - 3 + 0.3 * np.random.default_rng(0).normal(size=(200, 4, 4))
  m = sinkhorn(jnp.asarray(logits, jnp.float32))
  np.testing.assert_allclose(m.sum(axis=-1), 1, rtol=0, atol=1e-5)
  error = np.abs(m.sum(axis=-2) - 1).max(axis=-1)
  assert 1e-3 < np.median(error) < 1e-2


def test_sinkhorn_survives_huge_logits():
  n, rng = 4, np.random.default_rng(0)
  eye = np.eye(n)
  logits = np.stack(
    [
      *rng.uniform(-1e4, 1e4, size=(8, n, n)),
      *(1e4 * np.sign(rng.normal(size=(4, n, n)))),
      *(1e4 * eye, -1e4 * eye),
      *(np.full((n, n), value) for value in (-1e4, 0.0, 1e4)),
    ]
  )
  weights = jnp.array(rng.normal(size=logits.shape), jnp.float32)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(logits):
    m = sinkhorn(logits, iterations=20)
    return jnp.sum(weights * m), m

  (_, m), grad = jax.jit(loss)(jnp.array(logits, jnp.float32))
  assert np.isfinite(m).all()
  assert np.isfinite(grad).all()
  np.testing.assert_allclose(m.sum(axis=-1), 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_sinkhorn_gradient_equals_finite_differences_of_the_plain_iteration(size):
  rng = np.random.default_rng(0)
  logits, c = rng.normal(size=(2, 3, size, size)).astype(np.float32)
  grad = jax.jit(jax.grad(lambda logits: jnp.sum(c * sinkhorn(logits, iterations=20))))(logits)
  differences, eps = np.zeros(logits.shape), 1e-5
  for i in np.ndindex(*logits.shape):
    step = np.zeros(logits.shape)
    step[i] = eps
    up, down = (oracles.sinkhorn(np.float64(logits) + s) for s in (step, -step))
    differences[i] = np.sum(c * (up - down)) / (2 * eps)
  np.testing.assert_allclose(grad, differences, rtol=0, atol=2e-5 * np.abs(differences).max())


def test_an_identity_that_is_nearly_certain_still_has_a_gradient():
  bias = 6 * np.eye(4) - 3 + 0.3 * np.random.default_rng(0).normal(size=(4, 4))
  for sharpness in (1.0, 3.0, 10.0):  # at 10 the largest entry is 1 - 1e-25 of its row
    logits = jnp.asarray(sharpness * bias, jnp.float32)
    grad = jax.grad(lambda logits: jnp.log(sinkhorn(logits)[0, 1]))(logits)
    assert 0.1 < jnp.abs(grad).max() < 10


def test_no_iteration_is_refused():
  with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
    sinkhorn(jnp.zeros((2, 2)), iterations=0)
