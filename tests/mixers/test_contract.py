"""What every mixer must do, whatever it computes: one suite, every variant."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ldm_jax.config import MixerConfig
from ldm_jax.errors import InputError
from ldm_jax.mixers import (
  DeferredMemoryStreams,
  HyperConnections,
  ManifoldHyperConnections,
  make_mixer,
)
from ldm_jax.training.optimizer import decay_mask
from tests.rig import MECHANISMS, VARIANTS

B, T, D, SUBLAYERS = 2, 5, 16, 3
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Tests that compile for long run by default for these; for the other variants with  pytest -m slow.
QUICK = {*MECHANISMS, "delta", "attnres_full"}
NOT_A_SIGN = [name for name in VARIANTS if name != "key_dim_1"]


def slow_unless_quick(names):
  marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
  return pytest.mark.parametrize("name", marked)


class Stack(nn.Module):
  """A network of per-token sublayers inside mixers, which returns its output and last streams."""

  name_of_variant: str
  dtype: str = "float32"

  @nn.compact
  def __call__(self, x):
    mixers = [
      make_mixer(VARIANTS[self.name_of_variant], index, SUBLAYERS, self.dtype, f"mixer_{index}")
      for index in range(SUBLAYERS + 1)
    ]
    streams = mixers[-1].init_streams(x)
    for index, mixer in enumerate(mixers[:-1]):
      norm = nn.RMSNorm(use_scale=False, dtype=self.dtype)
      f = nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name=f"f_{index}")
      streams = mixer(streams, lambda h, f=f, norm=norm: jnp.tanh(f(norm(h))))
    return mixers[-1].read(streams), streams


X = jax.random.normal(jax.random.key(0), (B, T, D))


@functools.cache
def make(name):
  """The stack, parameters, its compiled apply and the compiled gradient of a loss."""
  stack = Stack(name)
  variables = nn.unbox(jax.jit(stack.init)(jax.random.key(1), X))
  return stack, variables, jax.jit(stack.apply), jax.jit(jax.value_and_grad(loss_of(stack.apply)))


def loss_of(apply):
  return lambda variables: jnp.mean(jnp.square(apply(variables, X)[0] - jnp.roll(X, 1, axis=-1)))


@every_variant
def test_streams_keep_their_shapes_and_dtypes(name):
  for dtype in ("float32", "bfloat16"):
    mixer = make_mixer(VARIANTS[name], 0, SUBLAYERS, jnp.dtype(dtype), "mixer")
    x = jax.ShapeDtypeStruct((B, T, D), dtype)
    start = jax.eval_shape(mixer.init_streams, x)
    stack = Stack(name, dtype)
    (y, end), _ = jax.eval_shape(lambda x: stack.init_with_output(jax.random.key(0), x), x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if VARIANTS[name].kind == "attnres":  # the one that keeps outputs
      finished = SUBLAYERS // VARIANTS[name].block_size
      assert len(end.sources) == 1 + finished
      assert (end.partial is None) == (SUBLAYERS % VARIANTS[name].block_size == 0)
      for source in (*end.sources, end.partial or x):
        assert (source.shape, source.dtype) == (x.shape, x.dtype)
      assert end.reads == ()
    else:
      if isinstance(start, DeferredMemoryStreams):  # with writes put off as far as possible
        start, end = (jax.eval_shape(lambda s: s.explicit(), streams) for streams in (start, end))
      chex.assert_trees_all_equal_shapes_and_dtypes(start, end)


@every_variant
def test_call_is_read_then_f_then_write(name):
  # Those that can do without knowing their place among others.
  sublayers = 9 if VARIANTS[name].kind in ("hc", "mhc") else None
  mixer = make_mixer(VARIANTS[name], 1, sublayers, "float32", None)
  x, v = jax.random.normal(jax.random.key(0), (2, B, T, D))
  before, variables = mixer.init_with_output(
    jax.random.key(1), mixer.init_streams(x), lambda h: v + 0 * h
  )
  whole = mixer.apply(variables, before, lambda h: v * h)
  h = mixer.apply(variables, before, method="read")
  parts = mixer.apply(variables, before, v * h, method="write")
  chex.assert_trees_all_equal(whole, parts)


@every_variant
def test_no_token_sees_another(name):
  _, variables, apply, _ = make(name)
  before, after = apply(variables, X), apply(variables, X.at[1, 2].add(1.0))
  expected = np.ones((B, T), bool)
  expected[1, 2] = False
  np.testing.assert_array_equal((before[0] == after[0]).all(axis=-1), expected)
  for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    same = np.asarray(a == b)
    if not same.ndim:  # of no token
      assert same
      continue
    if same.shape[1:3] == (B, T):  # N streams
      same = same.all(axis=0)
    same = same.reshape(B, T, -1).all(axis=-1)
    # A P of one number may stay the same where the token changed.
    np.testing.assert_array_equal(same | ~expected, True)


@every_variant
def test_first_read_is_the_embedding_and_has_no_parameters(name):
  first = make_mixer(VARIANTS[name], 0, SUBLAYERS, "float32", None)
  read = lambda module: module.read(module.init_streams(X))
  y, variables = nn.init_with_output(read, first)(jax.random.key(0))
  np.testing.assert_array_equal(X, y)
  assert not variables


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=() if name == "hc" else pytest.mark.slow) for name in VARIANTS],
)
def test_vmap_and_remat_change_no_value(name):
  stack, variables, apply, gradient = make(name)
  narrow = VARIANTS[name].memory_dtype == "bfloat16"
  # A different order of the same float32 sums, or one flip of the last bfloat16 bit of a memory.
  close = functools.partial(
    chex.assert_trees_all_close, rtol=2e-2 if narrow else 1e-3, atol=2e-2 if narrow else 1e-5
  )
  plain = gradient(variables)
  chex.assert_tree_all_finite(plain)
  close(jax.jit(jax.value_and_grad(loss_of(jax.checkpoint(stack.apply))))(variables), plain)
  # Not jitted: single operations compile once for all variants.
  one_by_one = jax.vmap(lambda x: stack.apply(variables, x[None])[0][0])(X)
  close(one_by_one, apply(variables, X)[0])


# A key of one number has length 1 whatever the parameters say: only its sign depends on them.
@slow_unless_quick(NOT_A_SIGN)
def test_every_parameter_learns_within_three_steps_and_still_does_after_twenty(name):
  _, variables, apply, gradient = make(name)
  optimizer = optax.adam(1e-2)
  state, update = optimizer.init(variables), jax.jit(optimizer.update)
  sizes, start = [], None
  for _ in range(21):
    loss, grads = gradient(variables)
    start = loss if start is None else start
    sizes.append(jax.tree.map(lambda g: jnp.abs(g).max(), grads))
    updates, state = update(grads, state)
    variables = optax.apply_updates(variables, updates)
  assert loss < 0.9 * start
  early = jax.tree.map(lambda *size: max(size), *sizes[:3])
  # mHC's mixing moves slowly at first: its streams are still alike and a is 0.01.
  for when, least in ((early, 1e-9), (sizes[20], 1e-7)):
    largest = max(jax.tree.leaves(when))
    for path, size in jax.tree_util.tree_leaves_with_path(when):
      assert size > least * largest, jax.tree_util.keystr(path)
  if VARIANTS[name].kind in ("hc", "mhc") and VARIANTS[name].streams > 1:
    first, *others = apply(variables, X)[1].X
    for other in others:
      assert jnp.abs(other - first).max() > 1e-2 * jnp.abs(first).max()


@every_variant
def test_only_weight_matrices_of_keys_and_latents_decay(name):
  mask = decay_mask(make(name)[1]["params"])
  mixers = {key: value for key, value in mask.items() if key.startswith("mixer")}
  decayed = {path[-1].key for path, decays in jax.tree_util.tree_leaves_with_path(mixers) if decays}
  assert decayed == ({"latent_kernel", "key_kernel"} if VARIANTS[name].kind == "ldm" else set())


# Rounding may flip a sign, and the read with it.
@slow_unless_quick(NOT_A_SIGN)
def test_bfloat16_is_close_to_float32(name):
  _, variables, apply, _ = make(name)
  # Away from the start, where coefficients are constants.
  variables = jax.tree.map(
    lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), variables
  )
  wide = apply(variables, X)[0]
  narrow = jax.jit(Stack(name, "bfloat16").apply)(variables, X.astype(jnp.bfloat16))[0]
  # Each of the sublayers rounds a value of size ≤ max|h| to 8 bits a few times.
  assert jnp.abs(narrow - wide).max() <= SUBLAYERS * 4 * 2**-8 * jnp.abs(wide).max()


@every_variant
def test_whatever_weighs_streams_is_float32_also_in_bfloat16(name):
  weighing = []

  def record(next_method, args, kwargs, context):
    out = next_method(*args, **kwargs)
    if type(context.module).__name__ in (
      "Connections",
      "ManifoldCoefficients",
      "ReadControls",
      "WriteControls",
      "DepthQueries",
    ):
      weighing.extend(jax.tree.leaves(out))
    return out

  def run(x):
    with nn.intercept_methods(record):
      return Stack(name, "bfloat16").init_with_output(jax.random.key(0), x)

  (_, streams), _ = jax.eval_shape(run, X.astype(jnp.bfloat16))
  assert all(array.dtype == jnp.float32 for array in weighing)
  assert weighing or name == "preln"
  if VARIANTS[name].rule == "rls" and VARIANTS[name].kind == "ldm":
    assert jax.eval_shape(lambda s: s.P, streams).dtype == jnp.float32


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"kind": "ldn"}, "mixer kind 'ldn' is not one of preln, ldm, attnres, hc, mhc"),
    ({"rule": "rsl"}, "LinearDepthMemory: rule must be one of rls, delta, outer, got 'rsl'"),
    ({"readout": "memory"}, "readout must be one of add, memory_only"),
    ({"write_every": 0}, "write_every must be at least 1, got 0"),
    ({"key_dim": 0}, "key_dim must be at least 1"),
    ({"groups": 0}, "groups must be at least 1"),
    ({"kind": "attnres", "block_size": 0}, "AttentionResiduals: block_size must be at least 1"),
    ({"kind": "attnres", "block_size": -1}, "block_size must be at least 1, got -1"),
    ({"kind": "hc", "streams": 0}, "HyperConnections: streams must be at least 1"),
    ({"kind": "mhc", "streams": 0}, "ManifoldHyperConnections: streams must be at least 1"),
  ],
)
def test_bad_settings_are_refused_when_a_mixer_is_made(settings, message):
  with pytest.raises(InputError, match=message):
    make_mixer(MixerConfig(**settings), 1, SUBLAYERS, "float32", None)


@pytest.mark.parametrize("mixer", [HyperConnections(0), ManifoldHyperConnections(0)])
def test_mixers_with_a_head_of_their_own_kind_ask_for_the_number_of_sublayers(mixer):
  with pytest.raises(InputError, match=r"Connections needs sublayers = L"):
    mixer.init_streams(X)
