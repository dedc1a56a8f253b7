import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.ops.normalize import l2norm


def test_length_is_one_above_the_threshold():
  x = jax.random.normal(jax.random.key(0), (100, 8)) * jnp.logspace(-2, 3, 100)[:, None]
  np.testing.assert_allclose(jnp.linalg.norm(l2norm(x), axis=-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 2e-3, 2.1e-3, 1.0])
@pytest.mark.parametrize("key_dim", [1, 8])
def test_gradient_is_finite_and_below_1e3(scale, key_dim):
  x = scale * jnp.ones((key_dim,)) / jnp.sqrt(key_dim)
  jacobian = jax.jacobian(l2norm)(x)
  chex.assert_tree_all_finite(jacobian)
  assert jnp.abs(jacobian).max() < 1e3


def test_zero_stays_zero_and_bfloat16_keeps_its_dtype():
  out = l2norm(jnp.zeros((3, 4), jnp.bfloat16))
  assert out.dtype == jnp.bfloat16
  assert not out.any()
