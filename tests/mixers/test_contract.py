"""What every mixer must do, whatever it computes: one suite, every variant."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import MixerConfig
from ldm_jax.mixers import make_mixer

B, T, D, SUBLAYERS = 2, 5, 16, 2
LDM = MixerConfig(kind="ldm", groups=4, key_dim=3, latent_dim=8, gain_init=0.5)
VARIANTS = {
  "preln": MixerConfig(kind="preln"),
  "rls": LDM,
  "delta": dataclasses.replace(LDM, rule="delta"),
  "outer": dataclasses.replace(LDM, rule="outer"),
  "one_group": dataclasses.replace(LDM, groups=1),
  "shared_key": dataclasses.replace(LDM, shared_key=True),
  "key_dim_1": dataclasses.replace(LDM, key_dim=1),
  "more_keys_than_writes": dataclasses.replace(LDM, key_dim=2 * SUBLAYERS),
  "memory_only": dataclasses.replace(LDM, readout="memory_only"),
  "no_residual": dataclasses.replace(LDM, residual=False),
  "bfloat16_memory": dataclasses.replace(LDM, memory_dtype="bfloat16"),
}
every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


class Stack(nn.Module):
  """A network of per-token sublayers inside mixers, which returns its output and last streams."""

  config: MixerConfig
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x):
    mixers = [
      make_mixer(self.config, index, self.dtype, f"mixer_{index}") for index in range(SUBLAYERS + 1)
    ]
    streams = mixers[-1].init_streams(x)
    for index, mixer in enumerate(mixers[:-1]):
      f = nn.Dense(x.shape[-1], dtype=self.dtype, name=f"f_{index}")
      streams = mixer(streams, lambda h, f=f: jnp.tanh(f(h)))
    return mixers[-1].read(streams), streams


def make(config, dtype="float32"):
  stack = Stack(config, dtype)
  x = jax.random.normal(jax.random.key(0), (B, T, D), dtype)
  return stack, nn.unbox(jax.jit(stack.init)(jax.random.key(1), x)), x


@every_variant
def test_streams_keep_their_shapes_and_dtypes(config):
  for dtype in ("float32", "bfloat16"):
    mixer = make_mixer(config, 0, jnp.dtype(dtype), "mixer")
    x = jax.ShapeDtypeStruct((B, T, D), dtype)
    start = jax.eval_shape(mixer.init_streams, x)
    stack = Stack(config, dtype)
    (y, end), _ = jax.eval_shape(lambda x: stack.init_with_output(jax.random.key(0), x), x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    chex.assert_trees_all_equal_shapes_and_dtypes(start, end)


@every_variant
def test_call_is_read_then_f_then_write(config):
  mixer = make_mixer(config, 1, "float32", None)
  x, v = jax.random.normal(jax.random.key(0), (2, B, T, D))
  before, variables = mixer.init_with_output(
    jax.random.key(1), mixer.init_streams(x), lambda h: v + 0 * h
  )
  whole = mixer.apply(variables, before, lambda h: v * h)
  h = mixer.apply(variables, before, method="read")
  parts = mixer.apply(variables, before, v * h, method="write")
  chex.assert_trees_all_equal(whole, parts)


@every_variant
def test_no_token_sees_another(config):
  stack, variables, x = make(config)
  apply = jax.jit(stack.apply)
  before, after = apply(variables, x), apply(variables, x.at[1, 2].add(1.0))
  same = jax.tree.map(
    lambda a, b: np.asarray((a == b).reshape(B, T, -1).all(axis=-1)), before, after
  )
  expected = np.ones((B, T), bool)
  expected[1, 2] = False
  np.testing.assert_array_equal(same[0], expected)
  for leaf in jax.tree.leaves(same):  # a P of one number may stay the same where the token changed
    np.testing.assert_array_equal(leaf | ~expected, True)


@every_variant
def test_first_read_is_the_embedding_and_has_no_parameters(config):
  first = make_mixer(config, 0, "float32", None)
  x = jax.random.normal(jax.random.key(0), (B, T, D))
  read = lambda module: module.read(module.init_streams(x))
  y, variables = nn.init_with_output(read, first)(jax.random.key(0))
  np.testing.assert_array_equal(x, y)
  assert not variables


@every_variant
def test_jit_vmap_and_remat_change_no_value(config):
  stack, variables, x = make(config)
  narrow = config.memory_dtype == "bfloat16"
  # A different order of the same float32 sums, or one flip of the last bfloat16 bit of a memory.
  close = functools.partial(
    chex.assert_trees_all_close, rtol=2e-2 if narrow else 1e-3, atol=2e-2 if narrow else 1e-3
  )

  def loss(apply):
    return jax.jit(jax.value_and_grad(lambda variables: jnp.sum(jnp.sin(apply(variables, x)[0]))))

  plain = loss(stack.apply)(variables)
  chex.assert_tree_all_finite(plain)
  close(loss(jax.checkpoint(stack.apply))(variables), plain)
  apply = jax.jit(stack.apply)
  one_by_one = jax.jit(jax.vmap(lambda x: stack.apply(variables, x[None])[0][0]))(x)
  close(one_by_one, apply(variables, x)[0])


@every_variant
def test_every_parameter_gets_a_gradient(config):
  stack, variables, x = make(config)
  grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(stack.apply(p, x)[0]))))(variables)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert jnp.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  "config",
  # A key of one number is a sign: rounding may flip it, and the read with it.
  [config for name, config in VARIANTS.items() if name != "key_dim_1"],
  ids=[name for name in VARIANTS if name != "key_dim_1"],
)
def test_bfloat16_is_close_to_float32(config):
  stack, variables, x = make(config)
  wide = jax.jit(stack.apply)(variables, x)[0]
  narrow = jax.jit(Stack(config, "bfloat16").apply)(variables, x.astype(jnp.bfloat16))[0]
  # Each of the sublayers rounds a value of size ≤ max|h| to 8 bits a few times.
  assert jnp.abs(narrow - wide).max() <= SUBLAYERS * 4 * 2**-8 * jnp.abs(wide).max()
