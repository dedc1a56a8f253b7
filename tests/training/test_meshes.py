"""However the devices are arranged, a run has the same weights, gradients and losses."""

import jax
import numpy as np
import pytest

from ldm_jax.config import MeshConfig
from ldm_jax.sharding import MESH_AXES, make_mesh
from ldm_jax.training.checkpoint import Checkpointer
from ldm_jax.training.step import abstract_state, compile_train_step, init_state, put_batch
from tests.rig import MECHANISMS, with_kind, with_model
from tests.training.test_step import random_batch

STEPS = 10
MESHES = [(8, 1, 1, 1), (1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8)]
ALL_WAYS = (1, 2, 2, 2)


def mesh_of(sizes):
  devices = jax.devices()[: np.prod(sizes)]
  return make_mesh(MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True))), devices)


def start(config, sizes):
  mesh = mesh_of(sizes)
  return mesh, init_state(config, mesh)


def run(config, sizes):
  """Initial weights, gradient of the first step, losses, and shardings at the start and step 5."""
  mesh, state = start(config, sizes)
  batches = [
    put_batch(mesh, random_batch(seed, real=[32, 1, 5, 32, 8, 0, 3, 1])) for seed in (0, 1)
  ]
  weights, losses, shardings = jax.device_get(state.params), [], []
  with jax.set_mesh(mesh):
    step = compile_train_step(config, state, batches[0])
    for number in range(STEPS):
      if number in (0, 5):
        shardings.append(jax.tree.map(lambda leaf: leaf.sharding, state))
      state, metrics = step(state, batches[number % 2])
      losses.append(float(metrics.loss))
      if number == 0:  # (1 - beta1) times the clipped gradient
        gradient = jax.device_get(state.optimizer_state[1][0].mu)
  return weights, gradient, losses, shardings


@pytest.fixture(scope="module")
def alone():
  """The same on one device, made once for each mechanism."""
  results = {}

  def of(name, config):
    if name not in results:
      results[name] = run(config, (1, 1, 1, 1))
    return results[name]

  return of


def cases():
  for name in MECHANISMS:
    for sizes in MESHES:
      marks = () if sizes == ALL_WAYS and name == "rls" else pytest.mark.slow
      yield pytest.param(name, sizes, marks=marks, id=f"{name}-{'-'.join(map(str, sizes))}")


@pytest.mark.parametrize(("name", "sizes"), list(cases()))
def test_a_run_on_a_mesh_is_the_run_on_one_device(name, sizes, alone):
  config = with_model(with_kind(name, steps=STEPS), blocks=1, vocab_size=257)
  weights, gradient, losses, (before, after) = run(config, sizes)
  expected_weights, expected_gradient, expected_losses, _ = alone(name, config)
  jax.tree.map(np.testing.assert_array_equal, weights, expected_weights)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
  assert before == after
  # With equal streams the weights of a read only scale what the next norm scales back: the gradient
  # of those of hc and mhc is nothing but cancellation, 1e-7 of the whole one.
  least = 1e-5 * np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
  for (path, leaf), expected in zip(
    jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(expected_gradient), strict=True
  ):
    error = np.linalg.norm(leaf - expected) / max(np.linalg.norm(expected), least)
    assert error < 1e-5, (jax.tree_util.keystr(path), error)


def test_a_process_may_hold_any_rows_in_any_order():
  mesh, batch, order = mesh_of((2, 2, 1, 2)), random_batch(), [6, 7, 2, 3, 0, 1, 4, 5]
  shuffled = jax.tree.map(lambda array: array[order], batch)
  put, expected = put_batch(mesh, shuffled, order, 8), put_batch(mesh, batch)
  for left, right in zip(put, expected, strict=True):
    np.testing.assert_array_equal(left, right)
    assert left.sharding == right.sharding


@pytest.fixture(scope="module")
def rls_state():
  config = with_model(with_kind("rls"), blocks=1)
  return config, jax.device_get(start(config, (1, 1, 1, 1))[1])


@pytest.mark.parametrize(
  "saved",
  [pytest.param(m, marks=() if m == (2, 2, 2, 1) else pytest.mark.slow, id=str(m)) for m in MESHES],
)
def test_saved_on_one_mesh_a_run_resumes_on_each_other(saved, rls_state, tmp_path):
  config, state = rls_state
  shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh_of(saved)))
  checkpointer = Checkpointer(tmp_path, 1)
  checkpointer.save(jax.device_put(state, shardings), {"tokens": 7})
  checkpointer.wait()
  for sizes in (*MESHES, (1, 1, 1, 1)):
    abstract = abstract_state(config, mesh_of(sizes))
    restored, record = checkpointer.restore_newest(abstract)
    assert record == {"tokens": 7}
    for leaf, other, shape in zip(*map(jax.tree.leaves, (restored, state, abstract)), strict=True):
      np.testing.assert_array_equal(leaf, other)
      assert leaf.sharding == shape.sharding
  checkpointer.close()
