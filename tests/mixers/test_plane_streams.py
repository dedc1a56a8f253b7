"""Streams as planes, which programs for TPUs keep, give the numbers of the streams as they are."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import MixerConfig
from ldm_jax.mixers import make_mixer, manifold_hyper_connections
from ldm_jax.ops.sinkhorn import sinkhorn_leading, sinkhorn_tokenwise

B, T, D = 1, 8, 16
MIXERS = {
  "mhc": MixerConfig(kind="mhc", streams=2),
  "hc": MixerConfig(kind="hc", streams=2),
  "attnres": MixerConfig(kind="attnres", block_size=2),
}
MORE = {
  "mhc_4": MixerConfig(kind="mhc", streams=4),
  "mhc_1": MixerConfig(kind="mhc", streams=1),
  "hc_3": MixerConfig(kind="hc", streams=3),
  "hc_1": MixerConfig(kind="hc", streams=1),
  "hc_static": MixerConfig(kind="hc", streams=2, dynamic=False),
  "attnres_full": MixerConfig(kind="attnres", block_size=1),
}


class Stack(nn.Module):
  """Sublayers inside mixers; streams as planes if `interpret` says how their kernels run."""

  config: MixerConfig
  sublayers: int
  interpret: bool | None = None

  @nn.compact
  def __call__(self, x):
    L = self.sublayers
    mixers = [make_mixer(self.config, l, L, "float32", f"mixer_{l}") for l in range(L + 1)]
    streams = mixers[-1].init_streams(x)
    if self.interpret is not None:
      streams = streams.as_planes(self.interpret)
    for l, mixer in enumerate(mixers[:-1]):
      kernel = self.param(f"f_{l}", nn.initializers.normal(D**-0.5), (D, D))
      streams = mixer(streams, lambda h, kernel=kernel: jnp.tanh(h @ kernel))
    return mixers[-1].read(streams)


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def values_and_gradients(stack, variables, x):
  def loss(variables, x):
    y = stack.apply(variables, x)
    return jnp.sum(normal(9, *y.shape) * y), y

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)


def assert_planes_change_nothing(config, sublayers, interpret):
  stack, x = Stack(config, sublayers), normal(0, B, T, D)
  variables = nn.unbox(stack.init(jax.random.key(1), x))
  in_planes = dataclasses.replace(stack, interpret=interpret)
  shapes = jax.eval_shape(in_planes.init, jax.random.key(1), x)
  assert jax.tree.map(jnp.shape, nn.unbox(shapes)) == jax.tree.map(jnp.shape, variables)
  # Away from the start, where coefficients are constants.
  variables = jax.tree.map(lambda p: p + 0.1 * normal(p.size, *p.shape), variables)
  expected = values_and_gradients(stack, variables, x)
  found = values_and_gradients(in_planes, variables, x)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
  ):
    error = jnp.abs(a - b).max()
    # Gradients of what Sinkhorn's iteration takes back are small differences of larger numbers.
    allowed = 3e-4 if "'res_" in jax.tree_util.keystr(path) else 1e-5
    assert error <= allowed * jnp.abs(b).max(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", MIXERS)
def test_kernels_on_planes_change_no_value_and_no_gradient(name, monkeypatch):
  monkeypatch.setattr(manifold_hyper_connections, "_ITERATIONS", 2)  # the interpreter is slow
  assert_planes_change_nothing(MIXERS[name], 3, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MIXERS, *MORE])
def test_planes_change_no_value_and_no_gradient(name):
  assert_planes_change_nothing((MIXERS | MORE)[name], 4, interpret=False)


def test_sinkhorn_of_tokens_in_all_rows_is_sinkhorn():
  logits = 3 * normal(0, 2, 2, 1, 16)
  found = sinkhorn_tokenwise(logits, 3, interpret=True)
  np.testing.assert_allclose(found, sinkhorn_leading(logits, 3), rtol=0, atol=1e-6)


def test_streams_are_planes_where_the_program_is_for_tpus():
  x = jax.ShapeDtypeStruct((2, 8, 32), jnp.bfloat16)
  mixer = make_mixer(MIXERS["mhc"], 0, 2, "bfloat16", None)
  assert not jax.eval_shape(mixer.init_streams, x).planes
