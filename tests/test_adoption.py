"""Mixers inside models that are not ours: a vision transformer, the README example, Flax NNX."""

import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ldm_jax import LinearDepthMemory, PreLN
from tests.rig import ROOT


class VisionTransformer(nn.Module):
  """Patches, full self-attention by Flax's own module, mean pooling."""

  mixer: type
  blocks: int = 2
  width: int = 16

  @nn.compact
  def __call__(self, images):
    x = nn.Conv(self.width, (4, 4), strides=(4, 4))(images)
    x = x.reshape(x.shape[0], -1, self.width)
    x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:])[None]
    mixers = [self.mixer(index, **self.settings()) for index in range(2 * self.blocks + 1)]
    streams = mixers[-1].init_streams(x)
    for block in range(self.blocks):
      attention = nn.MultiHeadDotProductAttention(num_heads=2)
      up, down, norms = nn.Dense(32), nn.Dense(self.width), (nn.LayerNorm(), nn.LayerNorm())
      streams = mixers[2 * block](streams, lambda h, f=attention, n=norms[0]: f(n(h)))
      streams = mixers[2 * block + 1](
        streams, lambda h, up=up, down=down, n=norms[1]: down(nn.gelu(up(n(h))))
      )
    return nn.Dense(3)(nn.LayerNorm()(mixers[-1].read(streams)).mean(axis=1))

  def settings(self):
    return {} if self.mixer is PreLN else {"groups": 4, "key_dim": 4, "latent_dim": 8}


@pytest.mark.parametrize("mixer", [PreLN, LinearDepthMemory])
def test_a_vision_transformer_learns_with_either_mixer(mixer):
  model = VisionTransformer(mixer)
  rng = np.random.default_rng(0)
  labels = jnp.asarray(rng.integers(0, 3, 24))
  images = jnp.asarray(rng.normal(size=(24, 8, 8, 1)) + np.asarray(labels)[:, None, None, None])
  images = images.astype(jnp.float32)
  params = model.init(jax.random.key(0), images)
  optimizer = optax.adam(1e-2)

  def loss(params):
    logits = model.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value

  state, values = optimizer.init(params), []
  for _ in range(40):
    params, state, value = step(params, state)
    values.append(float(value))
  assert values[0] > 0.8
  assert values[-1] < 0.2


def test_nnx_bridge_gives_the_same_values_and_gradients():
  x = jax.random.normal(jax.random.key(0), (2, 3, 16))
  mixer = LinearDepthMemory(1, groups=4, key_dim=4, latent_dim=8, gain_init=0.5)
  streams = mixer.init_streams(x)
  bridged = nnx.bridge.ToNNX(mixer, rngs=nnx.Rngs(0)).lazy_init(streams, jnp.tanh)
  variables = {"params": nnx.to_pure_dict(nnx.state(bridged, nnx.Param))}
  chex.assert_trees_all_equal_shapes(
    variables, nn.unbox(mixer.init(jax.random.key(0), streams, jnp.tanh))
  )
  out = bridged(streams, jnp.tanh)
  chex.assert_trees_all_close(out, mixer.apply(variables, streams, jnp.tanh), rtol=1e-6)

  def loss(out):
    return jnp.sum(jnp.sin(out.memory_matrix())) + jnp.sum(jnp.sin(out.x))

  grads = nnx.grad(lambda module: loss(module(streams, jnp.tanh)))(bridged)
  linen = jax.grad(lambda v: loss(mixer.apply(v, streams, jnp.tanh)))(variables)
  grads = nnx.to_pure_dict(grads)
  for name, value in linen["params"].items():
    chex.assert_trees_all_close(grads[name], value, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(
    bridged(out, method="read"), mixer.apply(variables, out, method="read"), rtol=1e-6
  )


def test_the_readme_example_runs_as_written():
  readme = (ROOT / "README.md").read_text("utf-8")
  blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
  assert blocks
  for block in blocks:
    exec(compile(block, "README.md", "exec"), {})
