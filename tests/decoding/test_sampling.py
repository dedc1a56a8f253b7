"""Temperature, then top-k, then top-p."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldm_jax.decoding import GREEDY, Sampling, sample_tokens
from ldm_jax.errors import InputError

SHARES = np.array([0.04, 0.4, 0.06, 0.2, 0.3], np.float32)


@functools.partial(jax.jit, static_argnums=1)
def draw(logits, count, sampling, allowed=None):
  keys = jax.random.split(jax.random.key(0), count)
  rows = jnp.broadcast_to(logits[None], (count, len(logits)))
  return sample_tokens(rows, keys, sampling, allowed)


def drawn(sampling, count=2000, allowed=None, shares=SHARES):
  return np.asarray(draw(jnp.log(shares), count, sampling.as_arrays(), allowed))


def test_shares_are_those_of_the_softmax_at_a_temperature():
  for temperature in (1.0, 0.5):
    expected = SHARES ** (1 / temperature)
    found = np.bincount(drawn(Sampling(temperature), 20_000), minlength=5) / 20_000
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.012)


def test_temperature_zero_is_the_most_likely_allowed_token():
  assert set(drawn(GREEDY)) == {1}
  assert set(drawn(GREEDY, allowed=np.array([True, False, True, True, True]))) == {4}
  assert set(drawn(Sampling(0.0, 2, 0.1))) == {1}
  assert set(drawn(GREEDY, shares=np.array([0.2, 0.4, 0.4], np.float32))) == {1}


@pytest.mark.parametrize(
  ("sampling", "kept"),
  [
    (Sampling(1.0, 2), {1, 4}),
    (Sampling(1.0, 1), {1}),
    (Sampling(1.0, 99), {0, 1, 2, 3, 4}),
    (Sampling(1.0, None, 0.39), {1}),
    (Sampling(1.0, None, 0.41), {1, 4}),
    (Sampling(1.0, None, 0.71), {1, 3, 4}),
    (Sampling(1.0, None, 1.0), {0, 1, 2, 3, 4}),
    (Sampling(1.0, None, 1e-9), {1}),
    # Top-p counts shares of what top-k has left: 4/7 and 3/7, of what the temperature has made.
    (Sampling(1.0, 2, 0.5), {1}),
    (Sampling(1.0, 2, 0.6), {1, 4}),
    (Sampling(0.1, None, 0.9), {1}),
    (Sampling(10.0, None, 0.9), {0, 1, 2, 3, 4}),
  ],
  ids=str,
)
def test_top_k_and_top_p_keep_the_most_likely(sampling, kept):
  assert set(drawn(sampling)) == kept


def test_what_keeps_all_changes_no_choice():
  plain = drawn(Sampling(1.0))
  np.testing.assert_array_equal(drawn(Sampling(1.0, 5, 1.0)), plain)


def test_ids_that_are_not_allowed_never_come_out_of_any_temperature():
  logits = jnp.zeros(384).at[257:].set(100.0)
  allowed = np.arange(384) < 257
  for sampling in (Sampling(5.0), Sampling(5.0, 300, 0.99)):
    assert draw(logits, 2000, sampling.as_arrays(), allowed).max() < 257


def test_the_largest_numbers_choose_among_what_is_allowed():
  sampling = Sampling(1e30, 2**40).checked().as_arrays()
  logits, allowed = jnp.arange(8.0)[None], jnp.arange(8) < 3
  ids = [
    int(sample_tokens(logits, jax.random.split(jax.random.key(i), 1), sampling, allowed)[0])
    for i in range(20)
  ]
  assert set(ids) == {0, 1, 2}


@pytest.mark.parametrize(
  ("sampling", "option"),
  [
    (Sampling(-0.1), "--temperature -0.1"),
    (Sampling(float("nan")), "--temperature nan"),
    (Sampling(1e39), "--temperature 1e\\+39"),
    (Sampling(1.0, 0), "--top-k 0"),
    (Sampling(1.0, None, 0.0), "--top-p 0.0"),
    (Sampling(1.0, None, 1.1), "--top-p 1.1"),
    (Sampling(1.0, None, float("nan")), "--top-p nan"),
  ],
  ids=str,
)
def test_what_is_out_of_range_is_refused_by_its_option(sampling, option):
  with pytest.raises(InputError, match=option):
    sampling.checked()
