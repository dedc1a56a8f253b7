"""Every form of attention is the same function: splash in Pallas's interpreter equals plain."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ldm_jax.config import MeshConfig
from ldm_jax.errors import InputError
from ldm_jax.model import TransformerLM, attention_form
from ldm_jax.ops.attention import SPLASH_RESIDUALS, attention, splash_refusal
from ldm_jax.sharding import MESH_AXES, make_mesh, partition_spec
from ldm_jax.training.workdir import open_workdir, save_config
from tests.rig import needs_libtpu, tiny_config, with_model

# Lengths of the documents of a row; the last of one token are padding.
DOCUMENTS = {128: (1, 70, 1, 2, 40, 14), 256: (1, 130, 60, 1, 64)}


def case(B=1, T=128, H=2, J=2, C=64, dtype=jnp.float32):
  """Queries, keys, values, segment ids that differ from row to row, and weights of the outputs."""
  keys = jax.random.split(jax.random.key(T + C), 4)
  q, k, v, w = (
    jax.random.normal(key, (B, T, heads, C)).astype(dtype)
    for key, heads in zip(keys, (H, J, J, H), strict=True)
  )
  lengths = DOCUMENTS.get(T, (T // 4, 1, T - T // 4 - 1))
  rows = [np.repeat(np.arange(len(lengths)), np.roll(lengths, row)) for row in range(B)]
  return q, k, v, jnp.asarray(np.stack(rows), jnp.int32), w


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(form, q, k, v, segment_ids, w):
  def weighted(q, k, v):
    mixed = attention(q, k, v, segment_ids, form, interpret=form == "splash")
    return jnp.sum((mixed * w).astype(jnp.float32)), mixed

  gradients, mixed = jax.grad(weighted, (0, 1, 2), has_aux=True)(q, k, v)
  return dict(zip(("mixed", "q", "k", "v"), (mixed, *gradients), strict=True))


def errors(results, expected):
  """Largest error of each array, relative to the array's largest entry."""
  results, expected = jax.tree.map(lambda x: np.asarray(x, np.float64), (results, expected))
  return {
    name: np.abs(results[name] - expected[name]).max() / np.abs(expected[name]).max()
    for name in expected
  }


@pytest.mark.parametrize(
  "shape",
  [
    dict(B=2, T=640),  # blocks of 128: full ones, ones on the diagonal, and ones never run
    pytest.param(dict(H=4, J=2, C=128), marks=pytest.mark.slow),
    pytest.param(dict(T=256, C=32), marks=pytest.mark.slow),
    pytest.param(dict(B=2, T=1152, H=2, J=1, C=128), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_splash_equals_plain(shape):
  arguments = case(**shape)
  found = values_and_gradients("splash", *arguments)
  expected = values_and_gradients("plain", *arguments)
  assert max(errors(found, expected).values()) < 1e-5


def oracle(q, k, v, segment_ids, w):
  """Attention in float64 NumPy, without any mask array of JAX's, and its gradients by hand."""
  q, k, v, w = (np.asarray(x, np.float64) for x in (q, k, v, w))
  repeats = q.shape[2] // k.shape[2]
  k, v = np.repeat(k, repeats, 2), np.repeat(v, repeats, 2)
  logits = np.einsum("bthc,bshc->bhts", q, k) / np.sqrt(q.shape[-1])
  ids, positions = np.asarray(segment_ids), np.arange(q.shape[1])
  seen = (ids[:, :, None] == ids[:, None]) & (positions[:, None] >= positions)
  p = np.where(seen[:, None], np.exp(logits - logits.max(-1, keepdims=True)), 0)
  p /= p.sum(-1, keepdims=True)
  dp = np.einsum("bthc,bshc->bhts", w, v)
  ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
  summed = lambda x: x.reshape(*x.shape[:2], -1, repeats, x.shape[-1]).sum(3)
  return {
    "mixed": np.einsum("bhts,bshc->bthc", p, v),
    "q": np.einsum("bhts,bshc->bthc", ds, k),
    "k": summed(np.einsum("bhts,bthc->bshc", ds, q)),
    "v": summed(np.einsum("bhts,bthc->bshc", p, w)),
  }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_forms_equal_the_oracle(dtype):
  arguments = case(J=1, C=128, dtype=dtype)
  expected = oracle(*arguments)
  with jax.default_matmul_precision("default" if dtype == "bfloat16" else "highest"):
    plain = errors(values_and_gradients("plain", *arguments), expected)
    splash = errors(values_and_gradients("splash", *arguments), expected)
  assert all(plain[name] < (1e-5 if dtype == "float32" else 0.1) for name in expected)
  assert all(splash[name] < max(1e-5, 1.5 * plain[name]) for name in expected)


def test_a_token_sees_only_the_past_of_its_document():
  q, k, v, segment_ids, w = case()
  first, second = 1, 71  # the second document of 70 tokens, and the third of one
  changed = [x.at[:, first:second].add(1.0) for x in (q, k, v)]
  before = values_and_gradients("splash", q, k, v, segment_ids, w)
  after = values_and_gradients("splash", *changed, segment_ids, w)
  for name in before:  # the other documents to the bit
    same = np.asarray(before[name] == after[name])
    assert same[:, :first].all()
    assert same[:, second:].all()
    assert not same[:, first:second].any(axis=(2, 3)).all()
  at = 50
  later = [x.at[:, at:].add(1.0) for x in (q, k, v)]
  after = values_and_gradients("splash", *later, segment_ids, w)
  same = np.asarray(before["mixed"] == after["mixed"])
  assert same[:, :at].all()
  assert not same[:, at].any()


@pytest.mark.parametrize(
  ("mesh", "shape"),
  [
    (dict(data=2, tensor=2, sequence=2), dict(B=2, T=256, H=4, J=2)),
    pytest.param(dict(data=4, fsdp=2), dict(B=8), marks=pytest.mark.slow),
    pytest.param(dict(data=1, tensor=8), dict(H=8, J=8), marks=pytest.mark.slow),
    pytest.param(dict(data=1, sequence=8), dict(T=1024, J=1), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_split_over_devices_it_is_the_same(mesh, shape):
  arguments = case(**shape)
  expected = values_and_gradients("plain", *arguments)
  with jax.set_mesh(make_mesh(MeshConfig(**mesh))):
    found = values_and_gradients("splash", *arguments)
  assert max(errors(found, expected).values()) < 1e-5
  assert found["mixed"].addressable_shards[0].data.size == found["mixed"].size // 8


def test_it_runs_on_one_device_and_inside_a_foreign_shard_map():
  *arguments, _ = case(B=2)
  expected = {"mixed": attention(*arguments, "plain")}
  splash = functools.partial(attention, form="splash", interpret=True)
  with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
    assert errors({"mixed": jax.jit(splash)(*arguments)}, expected)["mixed"] < 1e-5
  mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  rows = PartitionSpec("rows")
  by_row = jax.shard_map(splash, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
  assert errors({"mixed": jax.jit(by_row)(*arguments)}, expected)["mixed"] < 1e-5


def kernels(function, *arguments):
  """How many kernels a function runs, after what it computes in vain is taken out."""
  jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
  return _count(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _count(jaxpr):
  return sum(
    equation.primitive.name == "pallas_call" or sum(map(_count, jaxprs_in_params(equation.params)))
    for equation in jaxpr.eqns
  )


def test_dots_keep_the_kernels_results_and_full_runs_it_again():
  q, k, v, segment_ids, w = case()

  def weighted(q):
    return jnp.sum(attention(q, k, v, segment_ids, "splash", interpret=True) * w)

  kept = jax.checkpoint_policies.save_only_these_names(SPLASH_RESIDUALS)
  assert kernels(jax.value_and_grad(weighted), q) == 3  # forward; dq; dk and dv
  assert kernels(jax.value_and_grad(jax.checkpoint(weighted, policy=kept)), q) == 3
  assert kernels(jax.value_and_grad(jax.checkpoint(weighted)), q) == 4


def tpu_mesh(*sizes, names=MESH_AXES):
  device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
  kinds = (AxisType.Auto,) * len(names)
  return AbstractMesh(sizes, names, axis_types=kinds, abstract_device=device)


def model_kernels(mesh, rows, length, form="auto", remat="none"):
  """How many kernels the gradient of the tiny model holds when traced for a mesh."""
  model = TransformerLM(with_model(tiny_config("preln"), attention=form).model, remat=remat)
  tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  with jax.sharding.use_abstract_mesh(mesh):
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return kernels(jax.value_and_grad(lambda p, t: model.apply(p, t).sum()), params, tokens)


def test_auto_asks_what_the_program_is_compiled_for():
  cpu = make_mesh(MeshConfig()).abstract_mesh
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 8, 128) == 2 * 3
  assert model_kernels(tpu_mesh(1, 2, 2, 2), 2, 256) == 2 * 3
  assert model_kernels(cpu, 8, 128) == 0
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 8, 130) == 0
  assert model_kernels(tpu_mesh(1, 2, 2, 2), 2, 128) == 0
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 1, 128) == 0  # one row, as for a sample
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 8, 128, "plain") == 0
  assert model_kernels(tpu_mesh(8, names=("x",)), 8, 128) == 0
  assert model_kernels(tpu_mesh(1, names=("x",)), 3, 128) == 2 * 3
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 8, 128, remat="dots") == 2 * 3
  assert model_kernels(tpu_mesh(8, 1, 1, 1), 8, 128, remat="full") == 2 * 4


def test_without_a_mesh_that_is_set_the_arrays_say_where_they_are():
  q, k, v, segment_ids, _ = case(B=2)
  attend = functools.partial(attention, form="splash", interpret=True)
  mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
  split = jax.device_put((q, k, v, segment_ids), NamedSharding(mesh, PartitionSpec("data")))
  found = {"mixed": jax.jit(attend)(*split)}
  assert errors(found, {"mixed": attention(*split, "plain")})["mixed"] < 1e-5
  foreign = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  split = jax.device_put(split, NamedSharding(foreign, PartitionSpec("x")))
  with pytest.raises(InputError, match=r"a mesh of axes \('x',\) .* under jax.set_mesh"):
    jax.jit(attend)(*split)
  with pytest.raises(InputError, match="needs a TPU and the program is for cpu"):
    attention(q, k, v, segment_ids, "splash")


@pytest.mark.parametrize(
  ("shape", "kv_heads", "mesh", "message"),
  [
    ((8, 130, 2, 64), 2, (8, 1, 1, 1), "data.sequence_length = 130 is not a multiple of 128 x"),
    ((8, 128, 2, 64), 2, (4, 1, 1, 2), "= 128 is not a multiple of 128 x mesh.sequence; change"),
    ((4, 128, 2, 64), 2, (4, 2, 1, 1), "batch_size = 4 is not a multiple of mesh.data x mesh.fsdp"),
    ((4, 128, 6, 64), 3, (4, 1, 2, 1), "model.kv_heads = 3 is not a multiple of mesh.tensor"),
    ((4, 128, 3, 64), 1, (4, 1, 2, 1), "model.heads = 3 is not a multiple of mesh.tensor"),
    ((4, 256, 4, 64), 2, (2, 2, 2, 2), None),
  ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(shape, kv_heads, mesh, message):
  refusal = splash_refusal(shape, kv_heads, "float32", tpu_mesh(*mesh), "tpu")
  assert refusal is None if message is None else message in refusal


@pytest.mark.parametrize(
  ("dtype", "precision", "runs"),
  [
    ("float32", "highest", True),
    ("float32", "high", False),
    ("bfloat16", None, True),
    ("bfloat16", "highest", False),
    ("float16", None, False),
  ],
)
def test_precisions_that_the_kernel_has_not_are_refused(dtype, precision, runs):
  with jax.default_matmul_precision(precision):
    refusal = splash_refusal((1, 128, 2, 64), 2, dtype, tpu_mesh(1, 1, 1, 1), "tpu")
  wanted = f"{dtype} arrays at jax_default_matmul_precision = {precision}; leave that unset"
  assert refusal is None if runs else wanted in refusal


def test_a_named_form_that_cannot_run_ends_a_run_before_work():
  config = with_model(tiny_config("preln"), attention="splash")
  with pytest.raises(InputError) as refused:
    attention_form(config, make_mesh(config.mesh))
  assert str(refused.value) == (
    "model.attention = splash cannot run: it needs a TPU and the program is for cpu; use a TPU, "
    "or set it to auto or plain"
  )
  for form in ("plain", "auto"):
    assert attention_form(with_model(config, attention=form), make_mesh(config.mesh))[0] == "plain"
  with pytest.raises(ValueError, match="unknown form of attention 'flash'"):
    attention(*case()[:4], "flash")


def test_a_run_may_go_on_with_another_form(tmp_path):
  config = tiny_config("preln")
  save_config(tmp_path, config)
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  assert open_workdir(tmp_path, with_model(config, attention="plain")) == []
  with pytest.raises(InputError, match=r"model.width was 32 and is now 64"):
    open_workdir(tmp_path, with_model(config, width=64))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh", [dict(fsdp=8), dict(fsdp=2, tensor=2, data=2), dict(fsdp=4, sequence=2)], ids=str
)
def test_a_tpu_runs_the_kernels_and_holds_no_logits(mesh, monkeypatch):
  for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
    monkeypatch.setenv(name, "1")
  topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
  mesh = make_mesh(MeshConfig(**{"data": 1, **mesh}), topology.devices)
  arguments = jax.eval_shape(lambda: case(B=8, T=512, H=4, J=2, dtype=jnp.bfloat16))
  placed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, partition_spec(("batch", "sequence")))
    ),
    arguments,
  )
  texts = {}
  for form in ("plain", "auto"):
    with jax.set_mesh(mesh), jax.default_matmul_precision("default"):
      compiled = jax.jit(functools.partial(values_and_gradients, form)).lower(*placed).compile()
    texts[form] = compiled.as_text()
  logits = rf"\[[\d,]*{512 // mesh.shape['sequence']},512\]"
  assert re.search(logits, texts["plain"])
  assert "tpu_custom_call" not in texts["plain"]
  assert not re.search(logits, texts["auto"])
  for kernel in ("fwd", "dq", "dkv"):
    assert f"splash_mha_{kernel}" in texts["auto"]
