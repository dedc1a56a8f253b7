"""The whole network: PreLN at the start, causal, documents apart, remat, presets of every size."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax import TransformerLM, load_config
from ldm_jax.config import MeshConfig
from ldm_jax.layers import rotary
from ldm_jax.mixers import make_mixer
from ldm_jax.model import mixer_parameter_count, parameter_count
from ldm_jax.sharding import make_mesh
from ldm_jax.training.step import compiler_options
from tests.rig import ABLATIONS, MECHANISMS, ROOT, tiny_config, with_kind, with_mixer, with_model

every_mechanism = pytest.mark.parametrize(
  "config", [with_kind(name) for name in MECHANISMS], ids=list(MECHANISMS)
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 12)), jnp.int32)


@functools.cache
def make(config, **settings):
  model = TransformerLM(config.model, **settings)
  return model, nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS)["params"])


def without_mixers(params):
  if not isinstance(params, dict):
    return params
  return {
    name: without_mixers(value) for name, value in params.items() if not name.endswith("_mixer")
  }


def test_mechanisms_start_from_the_same_weights():
  plain = make(with_kind("preln"))[1]
  for name in MECHANISMS:
    chex.assert_trees_all_equal(without_mixers(make(with_kind(name))[1]), plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "rule", ["rls", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("delta", "outer"))]
)
def test_gain_zero_gives_the_logits_of_preln_to_the_bit(rule, dtype):
  model, params = make(with_mixer(tiny_config(), rule=rule), dtype=jnp.dtype(dtype))
  plain = TransformerLM(tiny_config("preln").model, dtype=jnp.dtype(dtype))
  plain_params = without_mixers(params)
  assert parameter_count(plain_params) < parameter_count(params)
  # In bfloat16 a compiler may keep more bits than a value's dtype has, differently in each program.
  jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
  np.testing.assert_array_equal(
    jit(model.apply)({"params": params}, TOKENS), jit(plain.apply)({"params": plain_params}, TOKENS)
  )
  if dtype == "float32":
    np.testing.assert_array_equal(
      jax.jit(model.apply)({"params": params}, TOKENS),
      jax.jit(plain.apply)({"params": plain_params}, TOKENS),
    )


@pytest.mark.parametrize(
  "config",
  [
    pytest.param(with_kind(name), marks=() if name == "rls" else pytest.mark.slow)
    for name in MECHANISMS
  ],
  ids=list(MECHANISMS),
)
def test_no_logit_depends_on_a_later_token(config):
  model, params = make(config)
  vocab = model.config.padded_vocab_size
  onehot = jax.nn.one_hot(TOKENS, vocab)

  def logits(onehot):  # differentiable in the tokens: embed by a matrix product
    tokens = jax.lax.stop_gradient(jnp.argmax(onehot, -1))
    embedding = params["embedder"]["embedding"]
    shift = (onehot - jax.lax.stop_gradient(onehot)) @ embedding
    streams = lambda module, x: x + shift
    with nn.intercept_methods(_after_encode(streams)):
      return model.apply({"params": params}, tokens)

  position = 6
  grad = jax.grad(lambda x: jnp.sum(jnp.sin(logits(x)[:, position, :257])))(onehot)
  size = jnp.abs(grad).sum(axis=(0, 2))
  assert (size[: position + 1] > 0).all()
  np.testing.assert_array_equal(size[position + 1 :], 0)


def _after_encode(change):
  def interceptor(next_method, args, kwargs, context):
    out = next_method(*args, **kwargs)
    return change(context.module, out) if context.method_name == "encode" else out

  return interceptor


@every_mechanism
def test_packed_documents_do_not_see_each_other(config):
  model, params = make(config)
  segments = jnp.where(jnp.arange(12) < 5, 1, 2)[None].repeat(2, 0)
  positions = jnp.where(jnp.arange(12) < 5, jnp.arange(12), jnp.arange(12) - 5)[None].repeat(2, 0)
  apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens, positions, segments))
  logits, changed = apply(TOKENS), apply(TOKENS.at[:, 2].add(1))
  np.testing.assert_array_equal(logits[:, 5:], changed[:, 5:])
  assert (logits[:, 2:5] != changed[:, 2:5]).any()
  alone = model.apply({"params": params}, TOKENS[:, 5:])
  np.testing.assert_allclose(logits[:, 5:], alone, rtol=1e-4, atol=1e-5)


@every_mechanism
def test_padding_ids_are_masked_and_tied_embeddings_share_one_matrix(config):
  model, params = make(config)
  logits = model.apply({"params": params}, TOKENS)
  chex.assert_shape(logits, (2, 12, 384))
  assert logits.dtype == jnp.float32
  np.testing.assert_array_equal(jax.nn.softmax(logits)[..., 257:], 0)
  _, tied = make(with_model(config, tie_embeddings=True))
  assert parameter_count(params) - parameter_count(tied) == 384 * 32


@pytest.mark.parametrize(
  "name",
  ["mhc", *(pytest.param(name, marks=pytest.mark.slow) for name in ("attnres", "hc"))],
)
def test_remat_changes_no_value(name):
  grads = {}
  for remat in ("none", "full"):
    model, params = make(with_kind(name), remat=remat)
    loss = lambda p, model=model: jnp.mean(model.apply({"params": p}, TOKENS)[..., :257] ** 2)
    grads[remat] = jax.jit(jax.value_and_grad(loss))(params)
  chex.assert_trees_all_close(grads["full"], grads["none"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["preln", pytest.param("rls", marks=pytest.mark.slow)])
def test_less_memory_is_kept_with_remat(kind):
  config = with_model(with_mixer(with_kind(kind), key_dim=2), blocks=4, mlp_width=512)
  tokens = jnp.tile(TOKENS, (4, 8))
  results, memory = {}, {}
  for remat in ("none", "dots", "full"):
    model, params = make(config, remat=remat)
    loss = lambda p, model=model: jnp.mean(model.apply({"params": p}, tokens)[..., :257] ** 2)
    step = jax.jit(
      jax.value_and_grad(loss), compiler_options=compiler_options(make_mesh(MeshConfig()))
    )
    compiled = step.lower(params).compile()
    results[remat] = compiled(params)
    memory[remat] = compiled.memory_analysis().temp_size_in_bytes
  for remat in ("dots", "full"):
    chex.assert_trees_all_close(results[remat], results["none"], rtol=1e-3, atol=1e-6)
  assert memory["dots"] < memory["none"]
  assert memory["full"] < (memory["dots"] if kind == "preln" else memory["none"])


def test_grouped_query_attention_and_qk_norm_equal_their_expanded_form():
  config = with_model(tiny_config(), kv_heads=2, qk_norm=True)
  model, params = make(config)
  assert params["block_0"]["attention"]["key"]["kernel"].shape == (32, 2, 8)
  wide = jax.tree_util.tree_map_with_path(
    lambda path, p: (
      jnp.repeat(p, 2, axis=1) if path[-2].key in ("key", "value") and p.ndim == 3 else p
    ),
    params,
  )
  expanded = TransformerLM(with_model(config, kv_heads=4).model)
  np.testing.assert_allclose(
    model.apply({"params": params}, TOKENS),
    expanded.apply({"params": wide}, TOKENS),
    rtol=1e-4,
    atol=1e-5,
  )


def test_rotary_phases_are_exact_at_far_positions_in_bfloat16():
  x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
  at = lambda position: rotary(x, jnp.full((1, 1), position), 10_000.0)[0, 0, 0]
  phase = 1023 * 10_000.0 ** (-np.arange(4) / 4)
  expected = np.concatenate([np.cos(phase) - np.sin(phase), np.cos(phase) + np.sin(phase)])
  np.testing.assert_allclose(at(1023), expected, atol=2**-7)


def test_rotary_scores_depend_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
  score = lambda i, j: jnp.sum(
    rotary(q, jnp.full((1, 1), i), 100.0) * rotary(k, jnp.full((1, 1), j), 100.0)
  )
  np.testing.assert_allclose(score(5, 2), score(105, 102), rtol=1e-3)


PRESETS = {
  "ldm": {"tiny": 1_460_480, "400m": 418_551_808, "1_5b": 1_452_760_064},
  "preln": {"tiny": 1_304_192, "400m": 411_354_112, "1_5b": 1_439_270_912},
  "attnres": {"tiny": 1_307_264, "400m": 411_452_416, "1_5b": 1_439_467_520},
  "hc": {"tiny": 1_313_588, "400m": 411_649_244, "1_5b": 1_439_859_932},
  "mhc": {"tiny": 1_433_501, "400m": 415_926_505, "1_5b": 1_448_414_441},
}


@pytest.mark.parametrize(
  ("kind", "size"), [(kind, size) for kind in PRESETS for size in PRESETS[kind]]
)
def test_presets_have_the_stated_sizes_and_streams(kind, size):
  config = load_config(ROOT / "configs" / f"{kind}_{size}.py")
  assert config.model.mixer.kind == kind
  count = PRESETS[kind][size]
  model = TransformerLM(config.model, jnp.dtype(config.train.compute_dtype), config.train.remat)
  tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])
  assert parameter_count(params) == count
  assert count - mixer_parameter_count(params) == PRESETS["preln"][size]
  chex.assert_trees_all_equal_dtypes(
    params, jax.tree.map(lambda p: jnp.zeros((), "float32"), params)
  )
  width, last = config.model.width, config.model.sublayers
  x = jax.ShapeDtypeStruct((1, 8, width), model.dtype)
  mixer = make_mixer(config.model.mixer, last, last, model.dtype, "m")
  streams = jax.eval_shape(mixer.init_streams, x)
  if kind in ("hc", "mhc"):
    assert (streams.X.shape, streams.X.dtype) == ((4, 1, 8, width), model.dtype)
  if kind == "ldm":
    groups = config.model.mixer.groups
    matrix, P = jax.eval_shape(lambda s: (s.memory_matrix(), s.P), streams)
    assert matrix.shape == (1, 8, groups, width // groups, 8)
    assert P.shape == (1, 8, groups, 8, 8)
    assert P.dtype == jnp.float32
    assert matrix.dtype == jnp.dtype(config.model.mixer.memory_dtype)


@pytest.mark.parametrize("size", ["tiny", "400m", "1_5b"])
def test_presets_are_the_same_but_for_the_mixer(size):
  ldm = load_config(ROOT / "configs" / f"ldm_{size}.py")
  assert ldm.data.batch_size * ldm.data.sequence_length == (2048 if size == "tiny" else 2**20)
  for kind in PRESETS:
    config = load_config(ROOT / "configs" / f"{kind}_{size}.py")
    same = with_model(config, mixer=ldm.model.mixer)
    if (kind, size) in (("attnres", "400m"), ("mhc", "400m")):  # published as selected for them
      assert config.optimizer.learning_rate == 2e-3
      same = dataclasses.replace(same, optimizer=ldm.optimizer)
    assert same == ldm


@pytest.mark.parametrize("size", ["tiny", "400m", "1_5b"])
def test_memory_only_presets_change_the_readout(size):
  config = load_config(ROOT / "configs" / f"ldm_memory_only_{size}.py")
  changes = dict(readout="memory_only", write_embedding=True, key_bias_init=1.0)
  assert config == with_mixer(load_config(ROOT / "configs" / f"ldm_{size}.py"), **changes)


@pytest.mark.parametrize(("name", "change"), ABLATIONS.items())
def test_ablations_change_one_thing(name, change):
  ablation = load_config(ROOT / "configs" / f"ldm_tiny_{name}.py")
  assert ablation == with_mixer(load_config(ROOT / "configs" / "ldm_tiny.py"), **change)
