"""Every mixer equals the float64 NumPy oracle of its equations, in value and in gradient."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.config import MixerConfig
from ldm_jax.mixers import make_mixer
from tests.mixers import oracles
from tests.rig import ablations

B, T = 2, 3
WIDTH = {1: 8, 2: 32, 3: 8, 7: 32, 24: 8}  # D for a number of sublayers
LDM = MixerConfig(kind="ldm", groups=4, key_dim=3, latent_dim=8, gain_init=0.5, alpha=2.0)
ATTNRES = MixerConfig(kind="attnres", block_size=3)
HC = MixerConfig(kind="hc", streams=4, dynamic=True)
MHC = MixerConfig(kind="mhc", streams=4)
MAIN = {"rls": LDM, "attnres_block_3": ATTNRES, "hc_dynamic": HC, "mhc": MHC}
OTHERS = {
  "preln": MixerConfig(kind="preln"),
  **ablations(LDM),
  **{
    f"embedding_{rule}": dataclasses.replace(LDM, rule=rule, write_embedding=True)
    for rule in ("rls", "delta", "outer")
  },
  "attnres_full": dataclasses.replace(ATTNRES, block_size=1),
  "attnres_block_2": dataclasses.replace(ATTNRES, block_size=2),
  "hc_static": dataclasses.replace(HC, dynamic=False),
}
DEPTHS = {
  **dict.fromkeys(MAIN, (1, 2, 3, 7, 24)),
  **dict.fromkeys(OTHERS, (3, 24)),
  **dict.fromkeys(("block_writes", "attnres_full"), (1, 3, 24)),
}
# What takes long and is also held to another form, or to a deeper case.
ON_DEMAND = ("one_group", "shared_key", "no_forgetting", "no_importance", "embedding_rls")
CASES = [
  pytest.param(
    config,
    sublayers,
    id=f"{name}-{sublayers}",
    marks=pytest.mark.slow if name in ON_DEMAND or sublayers in (1, 24) else (),
  )
  for name, config in {**MAIN, **OTHERS}.items()
  for sublayers in DEPTHS[name]
]


def dense_tanh(h, weights, xp=jnp):
  kernel, bias = weights
  return xp.tanh(h @ kernel + xp.broadcast_to(bias, h.shape))


def normed_tanh(h, weights, xp=jnp):
  """The same of h scaled to length √D, so blind to the length of h."""
  return dense_tanh(h / xp.sqrt(xp.mean(h**2, axis=-1, keepdims=True)), weights, xp)


class Stack(nn.Module):
  """Sublayers f(h, weights[l]) inside mixers; returns the head's read and all the others."""

  config: MixerConfig
  sublayers: int
  told: bool = True  # whether mixers know the number of sublayers

  @nn.compact
  def __call__(self, x, weights, f=dense_tanh):
    mixers = [
      make_mixer(
        self.config,
        index=index,
        sublayers=self.sublayers if self.told else None,
        dtype=jnp.float32,
        name=f"mixer_{index}",
      )
      for index in range(self.sublayers + 1)
    ]
    streams, reads = mixers[-1].init_streams(x), []
    for mixer, w in zip(mixers[:-1], weights, strict=True):
      reads.append(mixer.read(streams))
      streams = mixer.write(streams, f(reads[-1], w))
    return mixers[-1].read(streams), reads


def inputs(sublayers, seed=0):
  """x0 [B, T, D], the sublayers' kernels and biases, and the direction c of the loss."""
  rng, width = np.random.default_rng(seed), WIDTH[sublayers]
  normal = lambda *shape, std=1.0: jnp.array(std * rng.normal(size=shape), jnp.float32)
  weights = [(normal(width, width, std=width**-0.5), normal(width)) for _ in range(sublayers)]
  return normal(B, T, width), weights, normal(B, T, width)


def init(stack, x, weights):
  return nn.unbox(stack.init(jax.random.key(0), x, weights)).get("params", {})


def scattered(params, seed=1):
  """Parameters away from their initial values, where some are zero."""
  rng = np.random.default_rng(seed)

  def move(path, leaf):
    noise, name = rng.normal(size=leaf.shape), path[-1].key
    if name in ("pre_scale", "post_scale", "res_scale"):
      return jnp.asarray(0.5 + 0.1 * noise, jnp.float32)
    # A product of 24 unconstrained mixing matrices must not explode.
    size = 0.1 if name in ("mix_weight", "alpha_scale") else 0.3
    return jnp.asarray(leaf + size * noise, jnp.float32)

  return jax.tree_util.tree_map_with_path(move, params)


def double(tree):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def numpy_run(config, params, x, weights, f=dense_tanh, oracle=None):
  f = functools.partial(f, xp=np)
  return oracles.run(config, double(params), double(x), double(weights), f, oracle)


def assert_close(actual, desired, rtol=2e-5):
  np.testing.assert_allclose(actual, desired, rtol=0, atol=rtol * np.abs(desired).max())


@pytest.mark.parametrize(("config", "sublayers"), CASES)
def test_values_and_gradients_equal_the_oracle(config, sublayers):
  stack = Stack(config, sublayers)
  x, weights, c = inputs(sublayers)
  variables = {"params": scattered(init(stack, x, weights)), "x": x}

  # Not jitted: sublayers share their shapes, so each operation compiles once for all of them and
  # for other mixers, where the whole gradient of 24 sublayers would compile for minutes.
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(variables):
    y, reads = stack.apply({"params": variables["params"]}, variables["x"], weights)
    return jnp.sum(c * y), (y, reads)

  (_, (y, reads)), grads = loss(variables)
  variables, weights, c = double((variables, weights, c))
  y_oracle, reads_oracle = numpy_run(config, variables["params"], x, weights)
  assert_close(y, y_oracle)
  for read, read_oracle in zip(reads, reads_oracle, strict=True):
    assert_close(read, read_oracle)

  def oracle_loss(leaves):
    variables = jax.tree.unflatten(structure, leaves)
    y, _ = oracles.run(
      config, variables["params"], variables["x"], weights, functools.partial(dense_tanh, xp=np)
    )
    return np.sum(c * y)

  # What a random unit direction typically sees of each gradient.
  sizes = jax.tree.map(lambda grad: np.linalg.norm(grad) / np.sqrt(grad.size), grads)
  rounding = 1e-6 * max(jax.tree.leaves(sizes))
  leaves, structure = jax.tree.flatten(variables)
  rng, eps = np.random.default_rng(2), 1e-5
  pairs = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(sizes), strict=True)
  for i, ((path, grad), size) in enumerate(pairs):
    direction = rng.normal(size=grad.shape)
    direction /= np.linalg.norm(direction)
    moved = lambda step: [*leaves[:i], leaves[i] + step * direction, *leaves[i + 1 :]]
    slope = (oracle_loss(moved(eps)) - oracle_loss(moved(-eps))) / (2 * eps)
    error = abs(np.sum(np.float64(grad) * direction) - slope)
    assert size > 0, f"{jax.tree_util.keystr(path)} has no gradient"
    assert error <= 1e-3 * size + rounding, (jax.tree_util.keystr(path), error / size)


@pytest.mark.parametrize("config", MAIN.values(), ids=MAIN.keys())
def test_values_equal_the_oracle_where_norms_are_mostly_epsilon(config):
  x, weights, _ = inputs(3)
  x, weights = 1e-3 * x, [(kernel, 1e-3 * bias) for kernel, bias in weights]
  stack = Stack(config, 3)
  params = scattered(init(stack, x, weights))
  y, reads = stack.apply({"params": params}, x, weights)
  jax.tree.map(assert_close, (y, reads), numpy_run(config, params, x, weights))


@pytest.mark.parametrize(("block_size", "sublayers"), [(1, 3), (2, 3), (3, 7)])
def test_attention_residuals_of_either_layout_are_the_same(block_size, sublayers):
  config = dataclasses.replace(ATTNRES, block_size=block_size)
  x, weights, _ = inputs(sublayers)
  alone = Stack(config, sublayers, told=False)
  params = scattered(init(alone, x, weights))
  assert list(params) == [f"mixer_{l}" for l in range(1, sublayers + 1)]
  together = {f"mixer_{sublayers}": params[f"mixer_{sublayers}"]}
  for first in range(0, sublayers, block_size):
    rows = range(max(first, 1), min(first + block_size, sublayers))
    if rows:
      together[f"mixer_{first}"] = jax.tree.map(
        lambda *rows: jnp.concatenate(rows), *(params[f"mixer_{l}"] for l in rows)
      )
  expected = numpy_run(config, params, x, weights, oracle=oracles.SeparateAttentionResiduals)
  for stack, held in ((alone, params), (Stack(config, sublayers), together)):
    y, reads = stack.apply({"params": held}, x, weights)
    jax.tree.map(assert_close, (y, reads), expected)


def test_parameters_of_attention_residuals_lie_with_the_first_sublayer_of_a_block():
  x, weights, _ = inputs(7)
  for block_size, rows in (
    (1, dict.fromkeys(range(1, 8), 1)),
    (2, {0: 1, 2: 2, 4: 2, 6: 1, 7: 1}),
    (3, {0: 2, 3: 3, 6: 1, 7: 1}),
    (7, {0: 6, 7: 1}),
  ):
    stack = Stack(dataclasses.replace(ATTNRES, block_size=block_size), 7)
    params = nn.unbox(jax.eval_shape(stack.init, jax.random.key(0), x, weights))["params"]
    shapes = jax.tree.map(lambda leaf: leaf.shape, params, is_leaf=lambda p: hasattr(p, "shape"))
    assert shapes == {
      f"mixer_{l}": {"queries": {"query": (n, x.shape[-1]), "norm_scale": (n, x.shape[-1])}}
      for l, n in rows.items()
    }


def test_attention_residuals_by_hand():
  config = dataclasses.replace(ATTNRES, block_size=2)
  x = jnp.array([[[3.0, 0, 0, 0]]])
  outputs = [jnp.array([[v]]) for v in ([0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 0.0])]
  stack, give = Stack(config, 3), lambda _, v: v
  variables = nn.unbox(stack.init(jax.random.key(0), x, outputs, give))
  rows = lambda leaf, row: jnp.broadcast_to(jnp.array([row], jnp.float32), leaf.shape)
  variables = jax.tree_util.tree_map_with_path(
    lambda path, leaf: rows(leaf, [2, 0, 0, 0] if path[-1].key == "query" else [1, 1, 1, 1]),
    variables,
  )
  _, reads = stack.apply(variables, x, outputs, give)
  np.testing.assert_allclose(
    np.squeeze(reads),
    [[3, 0, 0, 0], [2.9460414, 0.0179862, 0, 0], [2.9460414, 0.0179862, 0.0179862, 0]],
    rtol=0,
    atol=1e-6,
  )


@pytest.mark.parametrize("config", [HC, OTHERS["hc_static"]], ids=["dynamic", "static"])
def test_hyper_connections_start_as_preln(config):
  x, weights, _ = inputs(7)
  stack = Stack(config, 7)
  y, reads = stack.apply({"params": init(stack, x, weights)}, x, weights)
  y_preln, reads_preln = numpy_run(OTHERS["preln"], {}, x, weights)
  jax.tree.map(functools.partial(assert_close, rtol=1e-5), reads, reads_preln)
  assert_close(y, config.streams * y_preln, 1e-5)


def test_manifold_hyper_connections_start_as_preln_of_scaled_reads():
  x, weights, _ = inputs(7)
  stack, f = Stack(MHC, 7), normed_tanh
  params = init(stack, x, weights)
  y, reads = stack.apply({"params": params}, x, weights, f)
  y_preln, reads_preln = numpy_run(OTHERS["preln"], {}, x, weights, f)
  assert_close(y, y_preln, 1e-5)
  for read, read_preln in zip(reads, reads_preln, strict=True):
    factor = np.sum(read * read_preln) / np.sum(read_preln**2)
    assert factor > 0
    assert_close(read, factor * read_preln, 1e-5)


def test_manifold_hyper_connections_leave_out_only_mixes_without_effect():
  x, weights, _ = inputs(3)
  params = scattered(init(Stack(MHC, 3), x, weights))
  y, _ = Stack(MHC, 3).apply({"params": params}, x, weights)
  rng = np.random.default_rng(0)
  gentle = {
    f"res_{name}": 0.3 * rng.normal(size=shape)
    for name, shape in (("kernel", (4, x.shape[-1], 16)), ("bias", (4, 4)), ("scale", ()))
  }
  # Next to the identity, where mHC starts, 20 iterations leave columns unequal by some 3e-3.
  identity = gentle | {"res_bias": 6 * np.eye(4) - 3 + gentle["res_bias"]}
  for mixes, tolerance in ((gentle, 2e-5), (identity, 1e-2)):
    mixing = dict(params)
    for mixer in ("mixer_0", "mixer_2"):
      assert not set(mixes) & set(params[mixer]["coefficients"])
      mixing[mixer] = {"coefficients": params[mixer]["coefficients"] | mixes}
    expected, _ = numpy_run(MHC, mixing, x, weights, oracle=oracles.AlwaysMixing)
    assert_close(y, expected, tolerance)
