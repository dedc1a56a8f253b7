"""What a comparison is: which mixers, seeds and learning rates, and what is equal for all.

A comparison file is a Python file with `get_comparison() -> Comparison`; see `ldm_jax.compare`.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ldm_jax.config import Config, MixerConfig, load_from_file
from ldm_jax.config_checks import nearest
from ldm_jax.errors import InputError
from ldm_jax.typing import PathLike


class Run(NamedTuple):
  """One training run of a comparison: a mixer by its name, a peak learning rate and a seed."""

  mixer: str
  learning_rate: float
  seed: int

  @property
  def folder(self) -> str:
    """The name of its workdir, such as "ldm-lr0.004-seed0"."""
    return f"{self.mixer}-lr{self.learning_rate:g}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What `get_comparison()` of a comparison file returns."""

  base: Config
  """Every setting that is equal for all; its mixer, learning rate and two seeds are replaced."""
  mixers: dict[str, MixerConfig]
  """What is compared, by names that also name folders."""
  seeds: tuple[int, ...]
  """Each sets the initial weights and the order of the rows."""
  learning_rates: tuple[float, ...]
  """Peak rates; each mixer is judged at its best one."""
  baseline: str = "preln"
  """The mixer that differences and ratios are against."""
  timing_rounds: int = 10
  """Timed train steps of each mixer."""

  def config(self, run: Run) -> Config:
    """The config of one run: `base` with the run's mixer, learning rate and seed."""
    base, replace = self.base, dataclasses.replace
    return replace(
      base,
      model=replace(base.model, mixer=self.mixers[run.mixer]),
      optimizer=replace(base.optimizer, learning_rate=run.learning_rate),
      data=replace(base.data, seed=run.seed),
      train=replace(base.train, seed=run.seed),
    )

  def runs(self) -> list[Run]:
    """All runs in the order they are trained in: seed by seed, and rate by rate in each.

    What is there after a while is then balanced between mixers.
    """
    return [
      Run(mixer, rate, seed)
      for seed in self.seeds
      for rate in self.learning_rates
      for mixer in self.mixers
    ]

  def validate(self) -> "Comparison":
    """Checks types, names and every config that follows; returns itself.

    Raises:
      InputError: naming the setting and, where one is at fault, the mixer.
    """
    self._check_mixers()
    for setting, kinds, words in (
      ("seeds", int, "ints"),
      ("learning_rates", (int, float), "floats"),
    ):
      values = getattr(self, setting)
      if not isinstance(values, tuple | list) or not all(_is_number(v, kinds) for v in values):
        raise InputError(f"{setting} must be a tuple of {words}, got {values!r}")
      texts = [f"{value:g}" for value in values]
      if not texts:
        raise InputError(f"{setting} is empty; give at least one")
      if len(set(texts)) < len(texts):
        raise InputError(f"{setting} has the same value twice (in six digits): {', '.join(texts)}")
    if not all(math.isfinite(rate) and rate > 0 for rate in self.learning_rates):
      raise InputError(f"learning_rates must be positive and finite, got {self.learning_rates}")
    if not _is_number(self.timing_rounds, int) or self.timing_rounds < 1:
      raise InputError(f"timing_rounds must be an int of at least 1, got {self.timing_rounds!r}")
    for run in self.runs():
      with naming(run.mixer):
        self.config(run).validate()
    return self

  def _check_mixers(self):
    if not isinstance(self.base, Config):
      raise InputError(f"base must be a Config, got {self.base!r}")
    if not isinstance(self.mixers, dict) or not self.mixers:
      raise InputError(
        f"mixers must be a dict from at least one name to a MixerConfig, got {self.mixers!r}"
      )
    for name, mixer in self.mixers.items():
      if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise InputError(
          f"mixers: {name!r} names a folder; use letters, digits, '_', '-' and '.' only, and start "
          "with a letter, a digit or '_'"
        )
      if not isinstance(mixer, MixerConfig):
        raise InputError(f"mixer {name!r} must be a MixerConfig, got {mixer!r}")
    if len({name.lower() for name in self.mixers}) < len(self.mixers):
      raise InputError(
        "mixers: two names differ only in upper and lower case, which some file systems do not "
        f"keep apart: {', '.join(self.mixers)}"
      )
    if self.baseline not in self.mixers:
      hint = nearest(str(self.baseline), self.mixers)
      raise InputError(
        f"baseline = {self.baseline!r} is not one of the mixers; the nearest is {hint!r}"
      )


def _is_number(value, kinds):
  return isinstance(value, kinds) and not isinstance(value, bool)


@contextlib.contextmanager
def naming(mixer: str) -> Iterator[None]:
  """Puts the mixer's name in front of what an `InputError` from inside says."""
  try:
    yield
  except InputError as error:
    raise InputError(f"mixer {mixer!r}: {error}") from error


def load_comparison(path: PathLike) -> Comparison:
  """Runs a comparison file and checks what its `get_comparison()` returns.

  Raises:
    InputError: if the file is missing or broken, misspells a setting, or the result is not valid.
  """
  return load_from_file(path, "get_comparison", Comparison)
