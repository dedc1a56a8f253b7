"""Mixers inside models that are not ours: a vision transformer, the README example, Flax NNX."""

import operator
import re
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ldm_jax import AttentionResiduals, LinearDepthMemory, PreLN
from ldm_jax.adoption import Adopted, graft, new_leaves
from ldm_jax.errors import InputError
from tests.rig import ROOT
from tests.strangers import CompactBlock, NNXBlock, SetUpBlock, Stranger

TOKENS = jax.random.randint(jax.random.key(5), (4, 6), 0, 16)
SETTINGS = {"groups": 2, "key_dim": 3, "latent_dim": 4}


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


@pytest.mark.parametrize("mixer", [pytest.param(PreLN, marks=pytest.mark.slow), LinearDepthMemory])
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


@pytest.mark.slow
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


def _memories(number=3):
  return [LinearDepthMemory(index, **SETTINGS) for index in range(number)]


def _adopted(mixers=None, model=None, **changes):
  chosen = {
    "reads": lambda module: isinstance(module, nn.LayerNorm),
    "writes": lambda module: type(module).__name__ in ("MultiHeadDotProductAttention", "Mlp"),
  }
  return Adopted(model or Stranger(), mixers or _memories(), **{**chosen, **changes})


@pytest.fixture(scope="module")
def pretrained():
  return jax.jit(Stranger().init)(jax.random.key(1), TOKENS)["params"]


@pytest.fixture(scope="module")
def fresh():
  return nn.unbox(jax.jit(_adopted().init)(jax.random.key(2), TOKENS)["params"])


def _different(params, scale):
  """Parameters in which nothing is at its special initial value."""
  rng = np.random.default_rng(3)
  return jax.tree.map(
    lambda leaf: leaf + scale * rng.normal(size=leaf.shape).astype(np.float32), params
  )


def test_an_adopted_model_starts_as_it_was_to_the_bit_with_its_old_paths(pretrained, fresh):
  params = graft(pretrained, fresh)
  assert set(params) - set(pretrained) == {f"mixers_{index}" for index in range(3)}
  chex.assert_trees_all_equal({name: params[name] for name in pretrained}, pretrained)
  was = jax.jit(Stranger().apply)({"params": pretrained}, TOKENS)
  apply = jax.jit(_adopted().apply)
  np.testing.assert_array_equal(apply({"params": params}, TOKENS), was)
  mixers = {name: params[name] for name in set(params) - set(pretrained)}
  changed = apply({"params": {**params, **_different(mixers, 1.0)}}, TOKENS)
  assert jnp.abs(changed - was).max() > 0.01


class Rewritten(nn.Module):
  """`Stranger` with its loop written anew around mixers."""

  mixers: list

  @nn.compact
  def __call__(self, tokens):
    block, (first, second, head) = SetUpBlock(name="block"), self.mixers
    streams = first(head.init_streams(nn.Embed(16, 8)(tokens)), block.attend)
    x = head.read(second(streams, block.think))
    return nn.Dense(16, name="head")(nn.LayerNorm(name="last")(x))


def test_exchanging_additions_is_writing_the_loop_anew():
  """With a mixer that has no use for the model's own sums."""
  mixers = [AttentionResiduals(index) for index in range(3)]
  written, adopted = Rewritten(mixers), _adopted(mixers)
  params = _different(nn.unbox(jax.jit(written.init)(jax.random.key(0), TOKENS)), 0.5)
  logits = [jax.jit(model.apply)(params, TOKENS) for model in (written, adopted)]
  np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)


def _train_new_leaves(model, params, pretrained, tokens, steps=8, **arguments):
  """Trains what is new; returns parameters and gradients of every step, and losses."""
  frozen = jax.tree.map(operator.not_, new_leaves(params, pretrained))
  optimizer = optax.selective_transform(optax.adam(3e-2), freeze_mask=frozen)

  def loss(params):
    logits = model.apply({"params": params}, tokens, **arguments)
    logits = logits[0] if isinstance(logits, tuple) else logits
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, grads

  state, trees, gradients, losses = optimizer.init(params), [params], [], []
  for _ in range(steps):
    params, state, value, grads = step(params, state)
    trees.append(params)
    gradients.append(grads)
    losses.append(float(value))
  return trees, gradients, losses


def _check_only_new_leaves_trained(model, pretrained, fresh, tokens, **arguments):
  params = graft(pretrained, fresh)
  trees, gradients, losses = _train_new_leaves(model, params, pretrained, tokens, **arguments)
  new = jax.tree.leaves_with_path(new_leaves(params, pretrained))
  gains = 0
  for number, (path, is_new) in enumerate(new):
    leaves = [jax.tree.leaves(tree)[number] for tree in trees]
    name = jax.tree_util.keystr(path)
    if not is_new:
      np.testing.assert_array_equal(leaves[-1], leaves[0], name)
      continue
    first = jax.tree.leaves(gradients[0])[number]
    gains += "gain" in name
    assert jnp.any(first != 0) == ("gain" in name), name  # the memory takes no part yet
    assert jnp.any(leaves[3] != leaves[0]), f"{name} did not move within three steps"
  assert gains
  assert losses[-1] < losses[0]


def test_training_the_new_leaves_leaves_the_old_as_they_are(pretrained, fresh):
  _check_only_new_leaves_trained(_adopted(), pretrained, fresh, TOKENS)


def test_graft_names_what_does_not_fit(pretrained, fresh):
  extra = {**pretrained, "lost": {"kernel": jnp.ones(2)}}
  with pytest.raises(InputError, match=r"have no place in the new model: lost/kernel;"):
    graft(extra, fresh)
  wrong = {**pretrained, "head": {**pretrained["head"], "bias": jnp.ones(3)}}
  with pytest.raises(
    InputError, match=r"another shape in the new model: head/bias \(\(3,\) is not"
  ):
    graft(wrong, fresh)
  with pytest.raises(InputError, match=r"a5 and 2 more|a4 and 2 more"):
    graft({f"a{number}": jnp.ones(1) for number in range(7)}, fresh)


def test_graft_keeps_boxes_and_old_dtypes():
  boxed = {
    "old": nn.Partitioned(jnp.zeros(2), ("embed",)),
    "new": nn.Partitioned(jnp.ones(3), (None,)),
  }
  params = graft({"old": jnp.full(2, 7, jnp.bfloat16)}, boxed)
  assert params["old"].names == ("embed",)
  assert params["old"].value.dtype == jnp.bfloat16
  np.testing.assert_array_equal(params["old"].value.astype(jnp.float32), [7, 7])
  mask = new_leaves(params, {"old": jnp.zeros(2)})
  assert jax.tree.structure(mask) == jax.tree.structure(params)
  assert (mask["old"].value, mask["new"].value) == (False, True)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixers": _memories(2)}, "block/Mlp_0 comes after the head's norm"),
    ({"mixers": _memories(3)[::-1]}, r"mixers\[0\] has index 2; number them 0, 1"),
    ({"mixers": _memories(4)}, "2 sublayers, and 3 norms.*4 mixers want 3 and 4"),
    ({"writes": lambda module: module.name == "Mlp_0"}, "LayerNorm_1 is a second norm before sub"),
    ({"reads": lambda module: module.name == "LayerNorm_0"}, "Mlp_0 is an output without a norm"),
    ({"reads": lambda module: False, "writes": lambda module: False}, "0 sublayers, and 0 norms"),
  ],
)
def test_norms_and_sublayers_that_do_not_alternate_are_refused(changes, message):
  with pytest.raises(InputError, match=message):
    jax.eval_shape(_adopted(**changes).init, jax.random.key(0), TOKENS)


@pytest.fixture
def griffin(monkeypatch):
  """recurrentgemma's Griffin, tiny.  The package pins versions that ours does not take."""
  monkeypatch.setattr("typeguard.typechecked", lambda function: function)  # it is for typeguard 2
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    modules = pytest.importorskip("recurrentgemma.jax", exc_type=ImportError)
    common = pytest.importorskip("recurrentgemma.common")
  config = common.GriffinConfig(
    vocab_size=16,
    width=8,
    mlp_expanded_width=16,
    num_heads=2,
    lru_width=8,
    block_types=(common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION),
    embeddings_scale_by_sqrt_dim=True,
    attention_window_size=8,
    logits_soft_cap=30.0,
    scan_type=common.ScanType.LINEAR_NATIVE,
  )
  with jax.numpy_rank_promotion("allow"):
    yield modules.Griffin(config, gradient_checkpointing=False)


def test_griffin_of_recurrentgemma_adopts_a_depth_memory(griffin):
  """Another lab's model, untouched: recurrent and attention blocks, and caches for decoding."""
  sublayers = ("recurrent_block", "attention_block", "mlp_block")
  adopted = Adopted(
    griffin,
    _memories(5),
    reads=lambda module: module.name.endswith("norm"),
    writes=lambda module: module.name in sublayers,
  )
  positions = jnp.broadcast_to(jnp.arange(6), TOKENS.shape)
  pretrained = jax.jit(griffin.init)(jax.random.key(0), TOKENS, positions)["params"]
  fresh = nn.unbox(jax.jit(adopted.init)(jax.random.key(1), TOKENS, positions)["params"])
  params = graft(pretrained, fresh)
  assert set(params) - set(pretrained) == {f"mixers_{index}" for index in range(5)}
  was, now = (
    jax.jit(lambda params, model=model: model.apply(params, TOKENS, positions)[0])
    for model in (griffin, adopted)
  )
  np.testing.assert_array_equal(now({"params": params}), was({"params": pretrained}))
  _check_only_new_leaves_trained(
    adopted, pretrained, fresh, TOKENS, segment_pos=positions, return_cache=False
  )

  params = {"params": _different(params, 0.1)}
  first, cache = jax.jit(adopted.apply)(params, TOKENS[:, :5], positions[:, :5])
  last, _ = jax.jit(adopted.apply)(params, TOKENS[:, 5:], positions[:, 5:], cache)
  decoded = jnp.concatenate([first, last], axis=1)
  np.testing.assert_allclose(decoded, now(params), rtol=1e-4, atol=1e-5)


def test_a_block_inside_a_transformation_is_refused(pretrained, fresh):
  model = _adopted(model=Stranger(nn.remat(CompactBlock)))
  params = {"params": graft(pretrained, fresh)}
  with pytest.raises(InputError, match="block/LayerNorm_0 is inside a transformation"):
    jax.eval_shape(model.apply, params, TOKENS)


class NNXTransformer(nnx.Module):
  """A block of NNX, mixers of Linen."""

  def __init__(self, tokens, rngs):
    self.embed, self.head = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
    self.block = NNXBlock(8, rngs)
    *sublayers, last = [nnx.bridge.ToNNX(mixer, rngs=rngs) for mixer in _memories()]
    streams = _memories()[-1].init_streams(self.embed(tokens))
    self.mixers = nnx.List([mixer.lazy_init(streams, lambda h: h) for mixer in sublayers])
    self.output_mixer = last.lazy_init(streams, method="read")

  def __call__(self, tokens):
    streams = self.output_mixer(self.embed(tokens), method="init_streams")
    for mixer, f in zip(self.mixers, (self.block.attend, self.block.think), strict=True):
      streams = mixer(streams, f)
    return self.head(self.output_mixer(streams, method="read"))


def test_an_nnx_transformer_trains_with_bridged_memories():
  model = nnx.jit(lambda: NNXTransformer(TOKENS, nnx.Rngs(0)))()
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    def loss(model):
      logits = model(TOKENS)
      return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value

  def mixers():
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param))["mixers"])

  before = mixers()
  losses = [float(step(model, optimizer)) for _ in range(12)]
  assert losses[-1] < 0.9 * losses[0]
  moved = jax.tree.map(lambda now, was: (now != was).any(), mixers(), before)
  assert all(jax.tree.leaves(moved)), moved
