"""Token ids from a model: prompts into a cache, then one token after another.

Prompts of a batch are padded on the left.  All but the last token of each goes into the cache in
chunks; the last one is where the loop begins, a `lax.while_loop` that runs one token of every row
through the model, chooses the next ones, and ends when all rows have.  Sizes are rounded up to
powers of two, so few programs are compiled, whatever the lengths of prompts and texts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from ldm_jax.cache import Cache, empty_cache
from ldm_jax.decoding.sampling import Sampling, sample_tokens
from ldm_jax.errors import InputError
from ldm_jax.model import TransformerLM, portable
from ldm_jax.sharding import RULES
from ldm_jax.training.step import platform_options
from ldm_jax.typing import PyTree

# Tokens of a prompt that go through the model at once: their attention holds chunk x slots logits.
_LARGEST_CHUNK = 512
_SMALLEST_BUCKET = 16
_SEEDS = 2**31


class Look(NamedTuple):
  """What there is so far.

  ids: the new ones of each prompt, without the id that ends it.
  done: whether its text has ended.
  """

  ids: list[list[int]]
  done: list[bool]


class _State(NamedTuple):
  """What the loop carries.

  cache: of all tokens but the last of each row.
  tokens: int32 [B, N], the new ones; `count` of them are there.
  last: int32 [B], the tokens to run next.
  positions: int32 [B], theirs.
  done: rows that have ended.
  """

  cache: Cache
  tokens: Int[Array, "B N"]
  count: Int[Array, ""]
  last: Int[Array, " B"]
  positions: Int[Array, " B"]
  done: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A model to continue sequences of token ids with.

  Attributes:
    model: the network; in place of forms for TPUs, decoding takes what can run, see `portable`.
    params: its parameters, on any mesh.
    context: the most tokens that the model is good for, before the last new one.
    end: the id that ends a text; None if nothing does.
    allowed: bool [vocab_size] or shorter, the ids that may come out; None for all of the model's.
  """

  model: TransformerLM
  params: PyTree
  context: int
  end: int | None = None
  allowed: np.ndarray | None = None

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    seed: int = 0,
  ) -> list[list[int]]:
    """New ids for each prompt, see `stream`."""
    *_, last = self.stream(prompts, max_new_tokens, sampling, seed)
    return last.ids

  def stream(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    seed: int = 0,
    stride: int | None = None,
  ) -> Iterator[Look]:
    """Continues all prompts together, and shows what is there now and then.

    A row's ids depend on its prompt, the seed and its number, not on the rest of the batch.

    Args:
      prompts: token ids, at least one each, such as the id between documents.
      max_new_tokens: at least 1; fewer come if a text ends.
      sampling: how tokens are chosen.
      seed: of the random choices.
      stride: tokens between two looks; None looks only when all is done.

    Yields:
      The new ids of each prompt so far, at least once.

    Raises:
      InputError: before any work, if a prompt is empty, has ids that the model has not, or does not
        fit into the context with its new tokens.
    """
    self._check(prompts, max_new_tokens, seed, stride)
    _, decode = programs(self._platform())
    run = functools.partial(decode, portable(self.model), self._mesh(len(prompts)))
    allowed = self._allowed()
    sampling = sampling.checked().as_arrays()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(prompts)))
    state = self._start(prompts, max_new_tokens)
    count = 0
    while count < max_new_tokens and not state.done.all():
      count = min(max_new_tokens, count + (stride or max_new_tokens))
      end = -1 if self.end is None else self.end
      state = run(self.params, state, jnp.int32(count), keys, sampling, allowed, jnp.int32(end))
      yield self._look(state)

  def _check(self, prompts, max_new_tokens, seed, stride):
    check_numbers(max_new_tokens, seed)
    if stride is not None and stride < 1:
      raise InputError(f"stride {stride}: look after at least 1 token, or give None")
    if not len(prompts):
      raise InputError("there are no prompts; give at least one")
    if not self._allowed().any():
      raise InputError("allowed lets no id come out; give None to allow all")
    for prompt in prompts:
      if not len(prompt):
        raise InputError("a prompt has no token; begin it with the id between documents")
      if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
        raise InputError(f"a prompt has ids that a model of {self.model.config.vocab_size} has not")
      if len(prompt) + max_new_tokens > self.context + 1:
        raise InputError(
          f"--max-new-tokens {max_new_tokens}: with a prompt of {len(prompt) - 1} tokens that is "
          f"more than the context of {self.context} tokens, data.sequence_length of the run; ask "
          "for fewer or shorten the prompt"
        )

  def _platform(self):
    return next(iter(jax.tree.leaves(self.params)[0].devices())).platform

  def _mesh(self, rows):
    """The mesh of the parameters and how rows are split over it; None on a single device."""
    sharding = jax.tree.leaves(self.params)[0].sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
      return None
    mesh = sharding.mesh
    axes = tuple(axis for axis in RULES["batch"] if mesh.shape.get(axis, 1) > 1)
    splits = axes and rows % math.prod(mesh.shape[axis] for axis in axes) == 0
    return mesh, PartitionSpec(axes if splits else None)

  def _allowed(self):
    allowed = np.zeros(self.model.config.padded_vocab_size, bool)
    own = slice(self.model.config.vocab_size)
    allowed[own] = True if self.allowed is None else _padded(self.allowed, allowed[own].size)
    return allowed

  def _start(self, prompts, max_new_tokens):
    """The state with all but the last token of each prompt in the cache."""
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = _bucket(lengths.max() - 1)
    slots = padded + _bucket(max_new_tokens)
    ids = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
      row[padded - len(prompt) + 1 :] = prompt[:-1]
    positions = np.arange(padded)[None] - (padded - lengths[:, None] + 1)
    model, mesh = portable(self.model), self._mesh(len(prompts))
    cache = _place(mesh, empty_cache(model.config, len(prompts), slots, model.dtype))
    prefill, _ = programs(self._platform())
    for start in range(0, padded, _LARGEST_CHUNK):
      part = np.s_[:, start : start + _LARGEST_CHUNK]
      cache = prefill(model, mesh, self.params, cache, ids[part], positions[part].astype(np.int32))
    return _place(
      mesh,
      _State(
        cache=cache,
        tokens=jnp.zeros((len(prompts), _bucket(max_new_tokens)), jnp.int32),
        count=jnp.zeros((), jnp.int32),
        last=jnp.array([prompt[-1] for prompt in prompts], jnp.int32),
        positions=jnp.array(lengths - 1, jnp.int32),
        done=jnp.zeros(len(prompts), bool),
      ),
    )

  def _look(self, state):
    tokens, count, done = jax.device_get((state.tokens, state.count, state.done))
    rows = tokens[:, :count].tolist()
    ids = [row[: row.index(self.end)] if self.end in row else row for row in rows]
    return Look(ids, done.tolist())


def check_numbers(max_new_tokens: int | None, seed: int) -> None:
  """Refuses numbers that are out of range, whatever the model.

  Args:
    max_new_tokens: None for what fits.
    seed: of the random choices.

  Raises:
    InputError: naming the option.
  """
  if max_new_tokens is not None and max_new_tokens < 1:
    raise InputError(f"--max-new-tokens {max_new_tokens}: ask for at least 1")
  if not 0 <= seed < _SEEDS:
    raise InputError(f"--seed {seed} must be at least 0 and below {_SEEDS}")


def _padded(allowed, size):
  return np.pad(np.asarray(allowed[:size], bool), (0, max(0, size - len(allowed))))


def _bucket(size):
  """The power of two from which on `size` tokens fit; 0 for none."""
  return 0 if size < 1 else max(_SMALLEST_BUCKET, 2 ** math.ceil(math.log2(size)))


def _place(mesh, tree):
  """Rows and key/value heads split over the mesh, on arrays and in programs alike."""
  if mesh is None:
    return tree
  mesh, (rows,) = mesh
  parts = mesh.shape.get("tensor", 1)

  def place(x):
    # Without None at the end, as programs return it: another spelling would compile them again.
    spec = [rows] if x.ndim and rows else []
    if x.ndim == 4 and x.shape[1] % parts == 0 and parts > 1:
      spec = [rows, "tensor"]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

  return jax.tree.map(place, tree)


@functools.cache
def programs(platform: str) -> tuple[Callable, Callable]:
  """`_prefill` and `_decode`, compiled for devices of a platform.

  On a CPU the order of operations counts for more than usual, since they are small: with XLA's
  default order, for concurrency, a token of LDM cost 1.2 times as much (`history`, 2 blocks).
  """
  compiled = functools.partial(
    jax.jit,
    static_argnums=(0, 1),
    donate_argnums=3,
    compiler_options=platform_options(platform),
  )
  return compiled(_prefill), compiled(_decode)


def _prefill(model, mesh, params, cache, tokens, positions):
  """The cache with the tokens in it; those of negative positions are padding."""
  segment_ids = (positions >= 0).astype(jnp.int32)
  positions = jnp.maximum(positions, 0)
  _, cache = model.apply({"params": params}, tokens, positions, segment_ids, None, cache)
  return _place(mesh, cache)


def _decode(model, mesh, params, state, count, keys, sampling, allowed, end):
  """Runs the loop until there are `count` new tokens or every row is done."""

  def going(state):
    return (state.count < count) & ~state.done.all()

  def step(state):
    tokens, positions = state.last[:, None], state.positions[:, None]
    logits, cache = model.apply(
      {"params": params}, tokens, positions, jnp.ones_like(tokens), None, state.cache
    )
    token_keys = jax.vmap(jax.random.fold_in)(keys, state.positions)
    token = sample_tokens(logits[:, -1], token_keys, sampling, allowed)
    token = jnp.where(state.done, end, token)
    return _State(
      cache=cache,
      tokens=jax.lax.dynamic_update_slice(state.tokens, token[:, None], (0, state.count)),
      count=state.count + 1,
      last=token,
      positions=state.positions + 1,
      done=state.done | (token == end),
    )

  return _place(mesh, jax.lax.while_loop(going, step, state))
