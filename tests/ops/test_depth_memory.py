"""The recurrences against two independent ridge solvers, and what they must survive."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from sklearn.linear_model import Ridge

from ldm_jax.ops import depth_memory as dm

WRITES = (12, 48, 200)
KEY_DIMS = (1, 4, 8, 16)
V = 5


def problem(writes, key_dim, seed=0, batch=(), dtype=np.float64):
  """Random unit keys, values, forgetting in (0.6, 1), importance in (0.1, 4); depth first."""
  rng = np.random.default_rng(seed)
  k = rng.normal(size=(writes, *batch, key_dim))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = rng.normal(size=(writes, *batch, V))
  forgetting = rng.uniform(0.6, 1, size=(writes, *batch[-1:]))
  importance = rng.uniform(0.1, 4, size=(writes, *batch))
  return tuple(jnp.asarray(x, dtype) for x in (k, v, forgetting, importance))


def scan_writes(k, v, forgetting, importance, alpha=1.0):
  """All writes in order; returns every M and P, depth first."""
  *batch, key_dim = k.shape[1:]
  groups = batch[-1] if batch else None
  start = dm.rls_init(tuple(batch[:-1]), groups, v.shape[-1], key_dim, alpha, k.dtype)

  def body(carry, x):
    carry = dm.rls_write(*carry, *x)
    return carry, carry

  return jax.lax.scan(body, start, (k, v, forgetting, importance))[1]


def sklearn_ridge(k, v, forgetting, importance, alpha):
  decay = np.array([np.prod(forgetting[i + 1 :]) for i in range(len(k))])
  model = Ridge(alpha=np.prod(forgetting) / alpha, fit_intercept=False, solver="cholesky")
  return model.fit(k, v, sample_weight=decay * importance).coef_


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_float64_is_the_ridge_solution(writes, key_dim):
  with jax.enable_x64(True):
    for seed, alpha in enumerate((1.0, 0.3, 5.0)):
      data = problem(writes, key_dim, seed)
      M, P = scan_writes(*data, alpha)
      np.testing.assert_allclose(M[-1], dm.ridge_solution(*data, alpha), rtol=0, atol=1e-10)
      np.testing.assert_allclose(
        M[-1], sklearn_ridge(*map(np.asarray, data), alpha), rtol=0, atol=1e-10
      )
      assert_symmetric_positive_definite(P)


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_float32_is_the_ridge_solution(writes, key_dim):
  with jax.enable_x64(True):
    data = problem(writes, key_dim)
    exact = np.asarray(dm.ridge_solution(*data))
  M, P = scan_writes(*(jnp.asarray(np.asarray(x), jnp.float32) for x in data))
  assert M.dtype == P.dtype == jnp.float32
  assert np.linalg.norm(M[-1] - exact) <= 1e-4 * np.linalg.norm(exact)
  assert_symmetric_positive_definite(P)


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("key_dim", KEY_DIMS)
def test_depth_weights_reproduce_every_read(writes, key_dim):
  with jax.enable_x64(True):
    k, v, forgetting, importance = problem(writes, key_dim)
    M, P = scan_writes(k, v, forgetting, importance)
    q = k[::-1]
    for last in (1, 2, writes // 2, writes):
      seen = (k[:last], q[last - 1], P[last - 1], forgetting[:last], importance[:last])
      w = dm.depth_weights(*seen)
      np.testing.assert_allclose(
        w @ v[:last], dm.read(M[last - 1], q[last - 1]), rtol=0, atol=1e-10
      )
    wide = np.asarray(w @ v)
  narrow = dm.depth_weights(*(jnp.asarray(np.asarray(x), jnp.float32) for x in seen))
  read = np.asarray(narrow) @ np.asarray(v)
  assert np.linalg.norm(read - wide) <= 1e-4 * np.linalg.norm(wide)


@pytest.mark.parametrize("forgetting_shape", ["per_group", "per_token"])
def test_groups_are_independent_ungrouped_problems(forgetting_shape):
  with jax.enable_x64(True):
    k, v, forgetting, importance = problem(12, 4, batch=(2, 3))
    if forgetting_shape == "per_token":
      forgetting = jnp.broadcast_to(forgetting[:, None], importance.shape)
    M, P = scan_writes(k, v, forgetting, importance)
    np.testing.assert_allclose(
      M[-1], dm.ridge_solution(k, v, forgetting, importance), rtol=0, atol=1e-10
    )
    w = dm.depth_weights(k, k[0], P[-1], forgetting, importance)
    np.testing.assert_allclose(
      jnp.einsum("lbg,lbgv->bgv", w, v), dm.read(M[-1], k[0]), rtol=0, atol=1e-10
    )
    for b in range(2):
      for g in range(3):
        f = forgetting[:, b, g] if forgetting.ndim == 3 else forgetting[:, g]
        alone, _ = scan_writes(k[:, b, g], v[:, b, g], f, importance[:, b, g])
        np.testing.assert_allclose(M[-1, b, g], alone[-1], rtol=0, atol=1e-14)


def test_python_scalars_are_forgetting_and_importance():
  k, v, _, _ = problem(3, 4, dtype=np.float32)
  M, P = dm.rls_init((), None, V, 4)
  chex.assert_shape((M, P), ((V, 4), (4, 4)))
  for i in range(3):
    M, P = dm.rls_write(M, P, k[i], v[i], 0.9, 2.0)
  np.testing.assert_allclose(M, dm.ridge_solution(k, v, 0.9, 2.0), rtol=1e-5, atol=1e-6)


def test_outer_and_delta_rules():
  k, v, _, _ = problem(4, 3, batch=(2,), dtype=np.float32)
  M = delta = jnp.zeros((2, V, 3))
  for i in range(4):
    M = dm.outer_write(M, k[i], v[i])
    delta = dm.delta_write(delta, k[i], v[i], jnp.full((2,), 0.25))
  np.testing.assert_allclose(M, jnp.einsum("lgv,lgk->gvk", v, k), rtol=1e-5, atol=1e-6)
  expected = np.zeros((2, V, 3))
  for i in range(4):
    error = np.asarray(v[i]) - np.einsum("gvk,gk->gv", expected, k[i])
    expected += 0.25 * np.einsum("gv,gk->gvk", error, k[i])
  np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
  # β = 1 stores exactly, for any unit key.
  stored = dm.read(dm.delta_write(delta, k[0], v[0], 1.0), k[0])
  np.testing.assert_allclose(stored, v[0], rtol=1e-5, atol=1e-5)


def test_rls_with_everything_remembered_and_orthogonal_keys_is_a_shrunk_outer_product():
  k, v = jnp.eye(4), jax.random.normal(jax.random.key(0), (4, V))
  M, P = dm.rls_init((), None, V, 4, alpha=3.0)
  outer = jnp.zeros((V, 4))
  for i in range(4):
    M, P = dm.rls_write(M, P, k[i], v[i], 1.0, 1.0)
    outer = dm.outer_write(outer, k[i], v[i])
  np.testing.assert_allclose(M, outer * 3 / 4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rls", "delta", "outer", "read", "ridge", "weights"])
def test_gradients_of_all_inputs_match_finite_differences(name):
  with jax.enable_x64(True):
    k, v, forgetting, importance = problem(3, 4, batch=(2,))
    M, P = (x[-1] for x in scan_writes(k, v, forgetting, importance))
    step = (k[0], v[0])
    function, args = {
      "rls": (dm.rls_write, (M, P, *step, forgetting[0], importance[0])),
      "delta": (dm.delta_write, (M, *step, importance[0] / 4)),
      "outer": (dm.outer_write, (M, *step)),
      "read": (dm.read, (M, k[0])),
      "ridge": (dm.ridge_solution, (k, v, forgetting, importance)),
      "weights": (dm.depth_weights, (k, k[0], P, forgetting, importance)),
    }[name]
    check_grads(function, args, order=1, modes=("rev",), atol=1e-6, rtol=1e-6)


def test_gradients_through_48_writes_are_the_oracle_s():
  with jax.enable_x64(True):
    data = problem(48, 4)
    weight = jax.random.normal(jax.random.key(0), (V, 4), jnp.float64)
    through = jax.grad(lambda *x: jnp.sum(weight * scan_writes(*x)[0][-1]), argnums=(0, 1, 2, 3))
    direct = jax.grad(lambda *x: jnp.sum(weight * dm.ridge_solution(*x)), argnums=(0, 1, 2, 3))
    chex.assert_trees_all_close(through(*data), direct(*data), rtol=1e-8, atol=1e-10)


def test_jit_vmap_and_remat_change_nothing():
  k, v, forgetting, importance = problem(2, 4, batch=(3, 2), dtype=np.float32)
  M, P = dm.rls_init((3,), 2, V, 4)
  args = (M, P, k[0], v[0], jnp.broadcast_to(forgetting[0][None], (3, 2)), importance[0])
  plain = dm.rls_write(*args)
  for transform in (jax.jit, jax.vmap, lambda f: jax.vmap(jax.vmap(f)), jax.checkpoint):
    chex.assert_trees_all_close(transform(dm.rls_write)(*args), plain, rtol=1e-6, atol=1e-6)
  loss = lambda f: jax.grad(lambda *x: f(*x)[0].sum() + f(*x)[1].sum(), argnums=range(6))(*args)
  chex.assert_trees_all_close(
    loss(jax.checkpoint(dm.rls_write)), loss(dm.rls_write), rtol=1e-5, atol=1e-6
  )


def hostile_problems(writes=200, key_dim=8):
  """Zero, repeated and few distinct keys under every forgetting and importance: [writes, cases]."""
  cases = list(
    itertools.product((0, 1, 2, 3), (0.5, 0.7, 0.98, 1.0), (0.0, 1e-30, 1e-3, 1.0, 100.0))
  )
  keys, values = [], []
  for seed, (distinct, _, _) in enumerate(cases):
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(max(distinct, 1), key_dim))
    base *= (distinct > 0) / np.linalg.norm(base, axis=-1, keepdims=True)
    keys.append(base[rng.integers(0, len(base), writes)])
    values.append(rng.normal(size=(writes, V)) * (distinct > 0))
  forgetting, importance = (
    np.broadcast_to([case[i] for case in cases], (writes, len(cases))) for i in (1, 2)
  )
  data = (np.stack(keys, axis=1), np.stack(values, axis=1), forgetting, importance)
  return tuple(jnp.asarray(x, jnp.float32) for x in data)


def test_degenerate_keys_stay_finite_symmetric_and_definite_for_200_writes():
  k, v, forgetting, importance = hostile_problems()
  M, P = scan_writes(k, v, forgetting, importance)
  chex.assert_tree_all_finite((M, P))
  assert_symmetric_positive_definite(P)

  def loss(k, v, forgetting, importance):
    M, P = scan_writes(k, v, forgetting, importance)
    return jnp.sum(dm.read(M[-1], k[0])) + jnp.mean(M**2) + 1e-3 * jnp.mean(P)

  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(k, v, forgetting, importance)
  chex.assert_tree_all_finite(grads)


def test_forgetting_is_unchanged_in_ordinary_use_and_bounded_where_P_would_overflow():
  data = problem(200, 16, dtype=np.float32)
  _, P = scan_writes(*data)
  for i in range(1, 200):
    assert dm.bounded_forgetting(P[i - 1], data[2][i]) == data[2][i]
  flooded = 900 * jnp.eye(4)
  np.testing.assert_allclose(dm.bounded_forgetting(flooded, 0.5), 900 / 1024, rtol=1e-6)
  assert dm.bounded_forgetting(5000 * jnp.eye(4), 0.5) == 1.0


def test_bfloat16_memory_sums_in_float32():
  k, v, forgetting, importance = problem(12, 8, dtype=np.float32)
  M, P = dm.rls_init((), None, V, 8)
  M = M.astype(jnp.bfloat16)
  for i in range(12):
    M, P = dm.rls_write(M, P, k[i], v[i], forgetting[i], importance[i])
  assert M.dtype == jnp.bfloat16
  assert dm.read(M, k[0].astype(jnp.bfloat16)).dtype == jnp.float32
  exact = dm.ridge_solution(k, v, forgetting, importance)
  # Each write rounds M to 8 bits: at most 12 half-units of 2⁻⁸ of its size.
  assert jnp.abs(M - exact).max() <= 12 * 2**-9 * jnp.abs(exact).max() * 2


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(groups=0, value_dim=4, key_dim=4), "groups must be at least 1, got 0"),
    (dict(groups=2, value_dim=0, key_dim=4), "value_dim must be at least 1, got 0"),
    (dict(groups=None, value_dim=4, key_dim=0), "key_dim must be at least 1, got 0"),
    (dict(groups=2, value_dim=4, key_dim=4, alpha=0.0), "alpha must be positive, got 0.0"),
  ],
)
def test_impossible_sizes_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    dm.rls_init((2,), **arguments)


def assert_symmetric_positive_definite(P):
  np.testing.assert_array_equal(P, np.swapaxes(P, -1, -2))
  assert np.linalg.eigvalsh(np.asarray(P, np.float64)).min() > 0
