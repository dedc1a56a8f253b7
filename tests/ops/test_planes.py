"""Operations on planes: plain = their equations, kernels = plain, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from ldm_jax.config import MeshConfig
from ldm_jax.errors import InputError
from ldm_jax.ops.planes import (
  group_products,
  planes_refusal,
  thin_product,
  thin_product_gradients,
  thin_refusal,
  tokenwise,
  tokenwise_refusal,
  weighted_sums,
)
from ldm_jax.sharding import MESH_AXES, make_mesh
from ldm_jax.tpu import topology_devices
from tests.rig import needs_libtpu

KERNEL = dict(form="kernel", interpret=True)
PLAIN = dict(form="plain")
# Sums are float32 in both forms, so they differ by its rounding; or by one of an output's own.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def normal(seed, *shape, dtype="float32"):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def errors(found, expected):
  def error(x, y):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    x, y = (np.asarray(value, np.float32) for value in (x, y))
    return float(np.abs(x - y).max() / np.abs(y).max())

  return jax.tree.map(error, found, expected)


def largest(found, expected):
  return np.max(jax.tree.leaves(errors(found, expected)))  # NaN if any is


def with_gradients(function, arguments):
  """What a function returns and the gradients of a sum of it that no symmetry makes zero."""

  def loss(arguments):
    outputs = function(*arguments)
    leaves = jax.tree.leaves(outputs)
    bars = [normal(50 + i, *x.shape) for i, x in enumerate(leaves)]
    total = sum(jnp.sum(bar * x.astype(jnp.float32)) for bar, x in zip(bars, leaves, strict=True))
    return total, outputs

  (_, outputs), bars = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)
  return outputs, bars


def mixing(planes, weights, base, **how):
  outs = weighted_sums(planes, weights, base, **how)
  return outs, group_products(outs, planes, weights.shape[3], **how)


def planes_case(O, P, B, D, T, G, dtype="float32", bases=()):
  planes = [normal(p, B, D, T, dtype=dtype) for p in range(P)]
  base = [normal(20 + o, B, D, T, dtype=dtype) if o in bases else None for o in range(O)]
  return planes, normal(40, O, P, B, G, T), base


def rls_write(P, k, w):
  """One write of the inverse covariance, packed by its lower triangle."""

  def at(i, j):
    i, j = max(i, j), min(i, j)
    return P[i * (i + 1) // 2 + j]

  K = len(k)
  Pk = [sum(at(i, j) * k[j] for j in range(K)) for i in range(K)]
  gain = w / (1 + w * sum(k[i] * Pk[i] for i in range(K)))
  out = np.empty(P.shape, object)
  for i in range(K):
    for j in range(i + 1):
      out[i * (i + 1) // 2 + j] = at(i, j) - gain * Pk[i] * Pk[j]
  return out, gain


def rls_case(K, B, G, T, dtype="float32"):
  packed = [normal(i, B, G, T) * 0.1 + float(i == j) for i in range(K) for j in range(i + 1)]
  return jnp.stack(packed), normal(30, K, B, G, T, dtype=dtype), abs(normal(31, B, G, T))


def thin_case(B, D, T, R, dtype="float32"):
  return normal(0, B, D, T, dtype=dtype), normal(1, R, D)


def test_plain_sums_and_products_are_their_equations():
  planes, weights, base = planes_case(O=2, P=3, B=2, D=12, T=5, G=3, bases=(1,))
  outs, prod = jax.jit(functools.partial(mixing, **PLAIN))(planes, weights, base)
  grouped = np.stack(planes).reshape(3, 2, 3, 4, 5)
  sums = np.einsum("opbgt,pbgvt->obgvt", weights, grouped).reshape(2, 2, 12, 5)
  assert largest(np.stack(outs), sums + np.stack([np.zeros_like(base[1]), base[1]])) < 1e-5
  left = np.stack(outs).reshape(2, 2, 3, 4, 5)
  assert largest(prod, np.einsum("obgvt,pbgvt->opbgt", left, grouped)) < 1e-5


@pytest.mark.parametrize(
  "case",
  [
    dict(O=2, P=1, B=1, D=96, T=200, G=3, dtype="bfloat16", bases=(0,)),  # T is cut unevenly
    pytest.param(dict(O=2, P=3, B=2, D=16, T=5, G=2, bases=(0,)), marks=pytest.mark.slow),
    # more outputs than are held at a time
    pytest.param(dict(O=9, P=2, B=1, D=24, T=12, G=1), marks=pytest.mark.slow),
    pytest.param(dict(O=1, P=12, B=1, D=2048, T=256, G=1), marks=pytest.mark.slow),
    pytest.param(dict(O=4, P=9, B=1, D=512, T=384, G=2), marks=pytest.mark.slow),
  ],
  ids=lambda case: "-".join(f"{k}{v}" for k, v in case.items()),
)
def test_kernels_of_sums_and_products_are_plain(case):
  arguments = planes_case(**case)
  plain, kernel = (
    with_gradients(functools.partial(mixing, **how), arguments) for how in (PLAIN, KERNEL)
  )
  assert largest(kernel, plain) < TOLERANCE[case.get("dtype", "float32")]


def test_groups_larger_than_a_block_are_summed_over_blocks():
  # 6 planes of 2 groups of 4,096 rows and 128 tokens: a block holds 2,048 rows of one group.
  left, right = ([normal(i + n, 1, 8192, 128) for i in range(n)] for n in (1, 5))
  weights = normal(9, 1, 5, 1, 2, 128)
  found, expected = (
    (group_products(left, right, 2, **how), weighted_sums(right, weights, **how))
    for how in (KERNEL, PLAIN)
  )
  assert largest(found, expected) < 1e-5


def test_dtypes_may_differ_and_outputs_have_the_one_asked_for():
  planes, weights, base = planes_case(O=1, P=2, B=1, D=32, T=8, G=2, bases=(0,))
  planes[1] = planes[1].astype("bfloat16")
  plain, kernel = (
    with_gradients(
      functools.partial(weighted_sums, dtype="bfloat16", **how), (planes, weights, base)
    )
    for how in (PLAIN, KERNEL)
  )
  assert largest(kernel, plain) < TOLERANCE["bfloat16"]
  (out,), (plane_bars, _, _) = kernel
  assert out.dtype == "bfloat16"
  assert [bar.dtype for bar in plane_bars] == ["float32", "bfloat16"]


@pytest.mark.parametrize(
  "case",
  [
    dict(B=1, D=512, T=200, R=3),
    pytest.param(dict(B=2, D=96, T=300, R=16, dtype="bfloat16"), marks=pytest.mark.slow),
    pytest.param(dict(B=2, D=4096, T=256, R=64), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_kernels_of_thin_products_are_plain(case):
  arguments = thin_case(**case)
  plain, kernel = (
    with_gradients(functools.partial(thin_product, **how), arguments) for how in (PLAIN, KERNEL)
  )
  tolerance = TOLERANCE[case.get("dtype", "float32")]
  assert largest(kernel, plain) < tolerance
  x, w = (np.asarray(value, np.float32) for value in arguments)
  (y, squares), _ = plain
  assert largest(y, np.einsum("rd,bdt->brt", w, x)) < tolerance
  assert largest(squares, np.sum(x**2, 1, keepdims=True)) < 1e-5


def test_gradients_of_thin_products_add_what_comes_in():
  x, w = thin_case(B=1, D=32, T=8, R=3)
  bars = normal(2, 1, 3, 8), normal(3, 1, 1, 8)
  incoming = normal(4, *x.shape)
  alone, w_bar = thin_product_gradients(x, w, *bars, **PLAIN)
  for how in (PLAIN, KERNEL):
    total = thin_product_gradients(x, w, *bars, incoming, **how)
    assert largest(total, (alone + incoming, w_bar)) < 1e-5


@pytest.mark.parametrize(
  "case",
  [
    dict(K=2, B=1, G=8, T=300, dtype="bfloat16"),
    pytest.param(dict(K=3, B=2, G=2, T=20), marks=pytest.mark.slow),
    pytest.param(dict(K=8, B=1, G=16, T=256), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_kernels_of_elementwise_functions_are_plain(case):
  arguments = rls_case(**case)

  def write(*arguments, **how):
    return tokenwise(rls_write, arguments, **how)

  plain, kernel = (
    with_gradients(functools.partial(write, **how), arguments) for how in (PLAIN, KERNEL)
  )
  assert largest(kernel, plain) < TOLERANCE[case.get("dtype", "float32")]


def test_an_elementwise_write_is_that_of_matrices():
  arguments = rls_case(K=3, B=1, G=2, T=4)
  found, _ = jax.jit(functools.partial(tokenwise, rls_write, **PLAIN))(arguments)
  packed, k, w = map(np.asarray, arguments)
  rows, columns = np.tril_indices(3)
  P = np.zeros((3, 3, *w.shape), np.float32)
  P[rows, columns] = P[columns, rows] = packed
  Pk = np.einsum("ij...,j...->i...", P, k)
  gain = w / (1 + w * np.sum(k * Pk, 0))
  expected = P - gain * Pk[:, None] * Pk[None]
  assert largest(found, expected[rows, columns]) < 1e-5


def test_a_body_that_mixes_positions_is_refused():
  k = normal(0, 2, 1, 2, 8)
  with pytest.raises(ValueError, match="tiles of the shape"):
    tokenwise(lambda k: k[0].sum(0), [k])
  with pytest.raises(ValueError, match="last three axes"):
    tokenwise(lambda k, w: w, [k, normal(1, 1, 2, 9)])


def everything(planes, weights, base, w, packed, k, importance, **how):
  outs, prod = mixing(planes, weights, base, **how)
  return (
    *(outs, prod, thin_product(planes[0], w, **how)),
    tokenwise(rls_write, (packed, k, importance), **how),
  )


def every_argument(B=4, D=32, T=16, G=2):
  planes = planes_case(O=1, P=2, B=B, D=D, T=T, G=G, bases=(0,))
  return *planes, normal(9, 3, D), *rls_case(K=2, B=B, G=G, T=T)


def test_eight_devices_compute_what_one_does():
  arguments = every_argument()
  expected = with_gradients(functools.partial(everything, **PLAIN), arguments)
  with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=2, sequence=2))):
    found = with_gradients(functools.partial(everything, **KERNEL), arguments)
  assert largest(found, expected) < 1e-5
  (outs, prod, _, (packed, _)), _ = found
  for x in (outs[0], prod, packed):
    assert x.addressable_shards[0].data.size == x.size // 8


def test_it_runs_inside_a_foreign_shard_map_and_on_one_device():
  planes, weights, _ = planes_case(O=1, P=2, B=2, D=16, T=8, G=2)
  (expected,) = weighted_sums(planes, weights, **PLAIN)
  mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  rows, weight_rows = PartitionSpec("rows"), PartitionSpec(None, None, "rows")
  mix = functools.partial(weighted_sums, **KERNEL)
  by_row = jax.shard_map(
    mix, mesh=mesh, in_specs=(rows, weight_rows), out_specs=rows, check_vma=False
  )
  assert largest(jax.jit(by_row)(planes, weights), (expected,)) < 1e-5
  with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
    assert largest(jax.jit(mix)(planes, weights), (expected,)) < 1e-5


OURS = AbstractMesh((2, 1, 2, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
NONE = AbstractMesh((), ())


@pytest.mark.parametrize(
  ("refusal", "says"),
  [
    (planes_refusal((2, 64, 8), 2, ["bfloat16"], OURS, "tpu"), None),
    (planes_refusal((2, 64, 8), 2, ["bfloat16"], OURS, "cpu"), "needs a TPU"),
    (planes_refusal((2, 48, 8), 3, ["bfloat16"], OURS, "tpu"), "groups = 3 is not a multiple of"),
    (planes_refusal((1, 64, 8), 2, ["bfloat16"], OURS, "tpu"), "mesh.data x mesh.fsdp"),
    (planes_refusal((1, 48, 8), 6, ["float32", "bfloat16"], NONE, "tpu"), "multiple of 16"),
    (planes_refusal((1, 48, 8), 6, ["float32"], NONE, "tpu"), None),
    (planes_refusal((1, 48, 8), 1, ["float16"], NONE, "tpu"), "make them float32 or bfloat16"),
    (thin_refusal((2, 48, 8), ["bfloat16"], OURS, "tpu"), "change the width or mesh.tensor"),
    (thin_refusal((2, 32, 8), ["bfloat16"], OURS, "tpu"), None),
    (tokenwise_refusal((2, 2, 7), OURS, "tpu"), "sequence = 7"),
    (
      tokenwise_refusal((2, 2, 8), AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,)), "tpu"),
      "knows nothing of",
    ),
  ],
)
def test_what_kernels_cannot_run_is_said(refusal, says):
  assert refusal is says is None or says in refusal


def test_a_kernel_that_is_asked_for_and_cannot_run_is_an_error():
  planes, weights, base = planes_case(O=1, P=2, B=1, D=16, T=8, G=2)
  with pytest.raises(InputError, match="set it to auto or plain"):
    weighted_sums(planes, weights, base, form="kernel")
  with pytest.raises(ValueError, match="unknown form"):
    weighted_sums(planes, weights, base, form="fast")
  with pytest.raises(ValueError, match="2 planes and 1 outputs"):
    weighted_sums(planes[:1], weights)
  assert largest(weighted_sums(planes, weights), weighted_sums(planes, weights, **PLAIN)) < 1e-6


@needs_libtpu
def test_everything_compiles_for_a_tpu():
  mesh = Mesh(
    np.reshape(topology_devices("v5e:1x1"), (1, 1, 1, 1)),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * 4,
  )
  arguments = jax.eval_shape(lambda: every_argument(B=1, D=64, T=200))
  with jax.set_mesh(mesh):

    def loss(arguments):
      outputs = everything(*arguments, form="kernel")
      return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(outputs))

    text = jax.jit(jax.grad(loss)).lower(arguments).compile().as_text()
  for kernel in ("weighted_sums", "group_products", "thin_product_gradients", "tokenwise"):
    assert kernel in text
