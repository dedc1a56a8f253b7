"""Every form of the depth memory gives the numbers and the gradients of the reference."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from ldm_jax.config import MixerConfig
from ldm_jax.errors import InputError
from ldm_jax.mixers import LinearDepthMemory, make_mixer
from ldm_jax.ops.depth_memory import forms

B, T, D, G = 1, 5, 32, 2
LDM = MixerConfig(kind="ldm", groups=G, key_dim=4, latent_dim=8, gain_init=0.7)


class Stack(nn.Module):
  """Per-token sublayers inside mixers; returns the head's input and the last memory."""

  mixer: MixerConfig
  sublayers: int
  known: bool = True
  dtype: str = "float32"
  packed: bool = False
  apart: bool = False

  @nn.compact
  def __call__(self, x):
    known = self.sublayers if self.known else None
    mixers = [
      make_mixer(self.mixer, index, known, self.dtype, f"mixer_{index}")
      for index in range(self.sublayers + 1)
    ]
    streams = mixers[-1].init_streams(x)
    for index, mixer in enumerate(mixers[:-1]):
      dense = nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name=f"f_{index}")
      if self.packed:
        streams = mixer.unpack(mixer.pack(streams))
      if self.apart:
        streams = mixer.write(streams, jnp.tanh(dense(mixer.read(streams))))
      else:
        streams = mixer(streams, lambda h, dense=dense: jnp.tanh(dense(h)))
    return mixers[-1].read(streams), streams.memory_matrix()


@pytest.fixture
def on_tpu(monkeypatch):
  """Programs count as programs for a TPU, whose kernels run in the interpreter."""
  monkeypatch.setattr(forms, "program_of", lambda x: (AbstractMesh((), ()), "tpu"))
  kernels = functools.partial(forms.TokenMinor, interpret=True)
  monkeypatch.setattr(forms, "TokenMinor", kernels)


def gradients(stack, variables, x):
  """The stack's outputs and the gradient of a sum of waves of them."""

  def loss(variables, x):
    y, M = stack.apply(variables, x)
    waves = jnp.sin(3 * y.astype(jnp.float32)).sum() + jnp.sin(M.astype(jnp.float32)).sum()
    return waves, (y, M)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(variables, x)


def compare(mixer, sublayers, tolerance=1e-5, shape=(B, T, D), **settings):
  """A form against the reference, at parameters away from the start."""
  x = jax.random.normal(jax.random.key(0), shape)
  reference = Stack(dataclasses.replace(mixer, form="reference", chunk=None), sublayers)
  variables = nn.unbox(jax.jit(reference.init)(jax.random.key(1), x))
  variables = jax.tree.map(
    lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), variables
  )
  (_, expected), expected_bars = gradients(reference, variables, x)
  (_, got), bars = gradients(Stack(mixer, sublayers, **settings), variables, x)
  for a, b in zip(got, expected, strict=True):
    assert jnp.abs(a - b).max() <= tolerance * jnp.abs(b).max()
  largest = max(jnp.abs(b).max() for b in jax.tree.leaves(expected_bars))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(bars), jax.tree.leaves(expected_bars), strict=True
  ):
    error = jnp.linalg.norm(a - b)
    assert error <= tolerance * (jnp.linalg.norm(b) + 0.1 * largest), jax.tree_util.keystr(path)


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("form", "chunk", "key_dim", "sublayers"),
  [
    ("history", None, 4, 7),
    ("chunked", 3, 4, 8),
    slow("chunked", 1, 8, 3),
    slow("state", None, 4, 4),
    slow("chunked", 8, 8, 20),
    *(
      slow(form, chunk, key_dim, sublayers)
      for form, chunk in (("history", None), ("chunked", 1), ("chunked", 3), ("chunked", 8))
      for key_dim in (1, 4, 8, 16)
      for sublayers in (1, 2, 48)
    ),
    *(slow("state", None, key_dim, sublayers) for key_dim in (1, 8, 16) for sublayers in (1, 2, 9)),
  ],
)
def test_a_form_equals_the_reference(form, chunk, key_dim, sublayers):
  mixer = dataclasses.replace(LDM, form=form, chunk=chunk, key_dim=key_dim)
  compare(mixer, sublayers, tolerance=1e-5 if sublayers < 48 else 5e-5)


@pytest.mark.parametrize(
  ("chunk", "key_dim", "sublayers"),
  [(2, 2, 3), *(slow(c, k, l) for c in (1, 3, 8, 12) for k in (1, 4, 8) for l in (1, 12))],
)
def test_the_kernels_equal_the_reference(on_tpu, chunk, key_dim, sublayers):
  compare(dataclasses.replace(LDM, form="kernel", chunk=chunk, key_dim=key_dim), sublayers)


@pytest.mark.parametrize(
  ("rows", "chunk", "settings"),
  [
    (1, None, {}),
    (5, 2, {"packed": True}),
    slow(5, None, {"apart": True}),
    slow(1, 2, {}),
    slow(513, None, {}),
  ],
)
def test_single_tokens_equal_the_reference(rows, chunk, settings):
  """As in decoding, where a write waits for the next read."""
  form = "history" if chunk is None else "chunked"
  mixer = dataclasses.replace(LDM, form=form, chunk=chunk)
  compare(mixer, 4, shape=(rows, 1, D), **settings)


def test_a_waiting_write_is_in_all_that_the_streams_show():
  x = jax.random.normal(jax.random.key(0), (3, 1, D))

  def shown(form):
    mixer = make_mixer(dataclasses.replace(LDM, form=form), 1, 4, "float32", None)

    def look(mixer, x):
      streams = mixer(mixer.init_streams(x), jnp.cos)
      seen = mixer.unpack(mixer.pack(streams))
      return streams.memory_matrix(), streams.P, seen.x, seen.P, mixer.read(streams)

    variables = nn.unbox(mixer.init(jax.random.key(1), x, method=look))
    return mixer.apply(variables, x, method=look)

  chex.assert_trees_all_close(shown("history"), shown("reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "changes",
  [
    {"rule": "outer"},
    slow({"readout": "memory_only", "write_embedding": True}),
    slow({"write_every": 2, "residual": False}),
    slow({"shared_key": True, "forgetting": False}),
    slow({"importance": False}),
    slow({"write_every": 2, "write_embedding": True}),
  ],
)
@pytest.mark.parametrize("form", ["chunked", slow("history"), slow("state")])
def test_ablations_equal_the_reference(form, changes):
  chunk = 2 if form == "chunked" else None
  compare(dataclasses.replace(LDM, form=form, chunk=chunk, **changes), 5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"rule": "outer"}, {"readout": "memory_only"}])
def test_ablations_of_the_kernels_equal_the_reference(on_tpu, changes):
  compare(dataclasses.replace(LDM, form="kernel", chunk=2, **changes), 4)


def test_a_stack_that_does_not_know_its_depth_equals_the_reference():
  compare(dataclasses.replace(LDM, form="chunked", chunk=3), 4, known=False)


@pytest.mark.parametrize(
  ("form", "chunk"), [("chunked", 3), slow("history", None), slow("state", None), slow("kernel", 3)]
)
def test_bfloat16_rounds_as_often_as_it_must(form, chunk, request):
  """Errors of a bfloat16 stack against float32: those of the reference, times two at most."""
  if form == "kernel":
    request.getfixturevalue("on_tpu")
  x = jax.random.normal(jax.random.key(0), (B, 16, D))
  mixer = dataclasses.replace(LDM, form="reference")
  exact = Stack(mixer, 8)
  variables = nn.unbox(jax.jit(exact.init)(jax.random.key(1), x))
  y = jax.jit(exact.apply)(variables, x)[0]

  def error(mixer):
    stack = Stack(dataclasses.replace(mixer, memory_dtype="bfloat16"), 8, dtype="bfloat16")
    narrow = jax.jit(stack.apply)(variables, x.astype(jnp.bfloat16))[0]
    return float(jnp.sqrt(jnp.mean(jnp.square(narrow - y))))

  assert error(dataclasses.replace(mixer, form=form, chunk=chunk)) <= 2 * error(mixer)


@pytest.mark.parametrize(
  "changes",
  [
    {"form": "chunked", "chunk": 2},
    slow({"form": "history"}),
    slow({"form": "chunked", "chunk": 3, "write_embedding": True}),
    slow({"form": "history", "residual": False}),
    slow({"form": "history", "write_every": 2}),
  ],
)
def test_packed_streams_come_out_to_the_bit_with_all_gradients(changes):
  mixer = dataclasses.replace(LDM, **changes)
  x = jax.random.normal(jax.random.key(0), (B, T, D))
  variables = nn.unbox(jax.jit(Stack(mixer, 5).init)(jax.random.key(1), x))
  (_, expected), expected_bars = gradients(Stack(mixer, 5), variables, x)
  (_, got), bars = gradients(Stack(mixer, 5, packed=True), variables, x)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(jax.tree.leaves(bars), jax.tree.leaves(expected_bars), strict=True):
    assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)


def test_reading_twice_is_not_a_wrong_gradient():
  mixer = dataclasses.replace(LDM, form="chunked", chunk=4)
  writer, reader = (make_mixer(mixer, index, 2, "float32", None) for index in (0, 1))
  x = jax.random.normal(jax.random.key(0), (B, T, D))
  streams = writer.init_streams(x)
  wrote = writer.init(jax.random.key(1), streams, x, method="write")
  streams = writer.apply(wrote, streams, x, method="write")
  read = reader.init(jax.random.key(2), streams, method="read")

  def gradient(times):
    def loss(v):
      after = writer.apply(wrote, writer.init_streams(x), v, method="write")
      return sum(reader.apply(read, after, method="read").sum() for _ in range(times))

    return jax.grad(loss)(x)

  assert np.isfinite(gradient(1)).all()
  assert np.isnan(gradient(2)).any()


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"form": "kernel"}, "form = kernel cannot run: it needs a TPU and the program is for cpu"),
    ({"form": "state", "rule": "delta"}, "form = state cannot run with model.mixer.rule = delta"),
    ({"form": "history"}, "form = history must know how many sublayers there are"),
    ({"form": "chunked", "chunk": 101}, "101 writes put off .* set chunk to at most 100"),
    ({"form": "chunked", "chunk": 0}, "chunk must be at least 1 or None"),
    ({"form": "fast"}, "form must be one of auto, reference"),
  ],
)
def test_a_form_that_cannot_run_is_refused(settings, message):
  with pytest.raises(InputError, match=message):
    LinearDepthMemory(0, groups=G, **settings).init_streams(jnp.zeros((B, T, D)))


def test_the_chunk_grows_with_the_memory_and_never_beyond_the_writes():
  sizes = [forms.best_chunk(48, key_dim) for key_dim in (1, 4, 8, 16)]
  assert sizes == sorted(sizes)
  assert forms.best_chunk(12, 8) == 12
  assert forms.best_chunk(48, 8, limit=5) == 5
  assert forms.step_traffic(1, 48, 8) > 1.5 * forms.step_traffic(8, 48, 8)
  assert forms.step_traffic(48, 48, 8) > 1.5 * forms.step_traffic(8, 48, 8)


def test_a_cpu_folds_later_than_a_tpu_since_it_goes_by_terms_and_not_by_traffic():
  assert forms.step_terms(1, 2, 3) == 3 * (1 + 3 + 4) / 2  # a read, the fold, a read of planes too
  assert forms.best_chunk(24, 8) < forms.best_chunk(24, 8, cost=forms.step_terms) == 24
  mixer = LinearDepthMemory(0, groups=G, sublayers=24)
  chosen = mixer.chosen_form(jnp.zeros((B, T, D)))
  assert (chosen.name, chosen.chunk) == ("history", 24)
