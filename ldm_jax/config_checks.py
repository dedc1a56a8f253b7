"""What makes a config valid.  Each error names the setting and the way out."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import typeguard

from ldm_jax.errors import InputError

_RANGES = (
  (
    lambda x: x >= 1,
    "at least 1",
    "model.width model.blocks model.heads model.mlp_width model.vocab_size model.mixer.groups "
    "model.mixer.key_dim model.mixer.latent_dim model.mixer.write_every model.mixer.block_size "
    "model.mixer.streams data.sequence_length data.batch_size train.steps "
    "train.log_every train.eval_every train.checkpoint_every train.keep train.accumulate",
  ),
  (
    lambda x: x >= 0,
    "at least 0",
    "optimizer.warmup_steps optimizer.weight_decay optimizer.z_loss train.eval_batches "
    "train.sample_tokens train.depth_metrics_every train.profile_start train.profile_steps "
    "data.workers",
  ),
  (lambda x: 0 <= x < 2**31, "at least 0 and below 2147483648", "data.seed train.seed"),
  (
    # The forgetting bound of the depth memory starts at a mean eigenvalue of P of 1,024.
    lambda x: 0 < x <= 100,
    "above 0 and at most 100",
    "model.mixer.alpha",
  ),
  (
    lambda x: x > 0,
    "positive",
    "model.rope_theta optimizer.learning_rate optimizer.clip_norm",
  ),
  (
    lambda x: 0 < x < 1,
    "between 0 and 1, both excluded",
    "model.mixer.min_forgetting model.mixer.forgetting_init",
  ),
  (lambda x: 0 <= x <= 1, "between 0 and 1", "optimizer.final_fraction"),
  (lambda x: 0 <= x < 1, "at least 0 and below 1", "model.dropout optimizer.beta1 optimizer.beta2"),
  (
    lambda x: x == -1 or x >= 1,
    "at least 1, or -1 for the rest of the devices",
    "mesh.data mesh.fsdp mesh.tensor mesh.sequence",
  ),
)


def check_types(section: Any, path: str = "") -> None:
  """Refuses values that do not have the type their dataclass declares.

  Raises:
    InputError: naming the setting.
  """
  for field in dataclasses.fields(section):
    value, key = getattr(section, field.name), f"{path}{field.name}"
    if dataclasses.is_dataclass(field.type):
      if not isinstance(value, field.type):
        raise InputError(f"{key}: expected {field.type.__name__}, got {value!r}")
      check_types(value, f"{key}.")
    elif not _has_type(value, field.type):
      raise InputError(f"{key}: expected {_describe(field.type)}, got {value!r}")


def _has_type(value, hint):
  if isinstance(value, bool) and hint is not bool:  # True is an int to Python, not to a user
    return False
  try:
    typeguard.check_type(value, hint)
  except typeguard.TypeCheckError:
    return False
  return True


def _describe(hint):
  if typing.get_origin(hint) is Literal:
    return "one of " + ", ".join(map(str, typing.get_args(hint)))
  return getattr(hint, "__name__", None) or str(hint)


def check_ranges(values: Mapping[str, Any]) -> None:
  """Refuses numbers out of range or not finite.

  Args:
    values: settings by dotted name, see `flatten`.

  Raises:
    InputError: naming the setting.
  """
  for key, value in values.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise InputError(f"{key} must be a finite number, got {value}")
  for holds, words, keys in _RANGES:
    for key in keys.split():
      if not holds(values[key]):
        raise InputError(f"{key} must be {words}, got {values[key]}")


def check_combinations(values: Mapping[str, Any]) -> None:
  """Refuses settings that do not fit each other.

  Args:
    values: settings by dotted name, see `flatten`.

  Raises:
    InputError: naming the settings.
  """

  def divides(small, large):
    if values[large] % values[small]:
      raise InputError(
        f"{small} = {values[small]} does not divide {large} = {values[large]}; change one of them"
      )

  divides("model.heads", "model.width")
  if (values["model.width"] // values["model.heads"]) % 2:
    raise InputError(
      f"model.heads = {values['model.heads']} gives heads of odd width "
      f"{values['model.width'] // values['model.heads']}; rotary positions need an even one"
    )
  if values["model.kv_heads"] is not None:
    if values["model.kv_heads"] < 1:
      raise InputError(f"model.kv_heads must be at least 1 or None, got {values['model.kv_heads']}")
    divides("model.kv_heads", "model.heads")
  if values["model.mixer.kind"] == "ldm":
    divides("model.mixer.groups", "model.width")
    rls = values["model.mixer.rule"] == "rls"
    if rls and values["model.mixer.forgetting_init"] <= values["model.mixer.min_forgetting"]:
      raise InputError(
        f"model.mixer.forgetting_init = {values['model.mixer.forgetting_init']} must be above "
        f"model.mixer.min_forgetting = {values['model.mixer.min_forgetting']}"
      )
    for switch in () if rls else ("forgetting", "importance"):
      if not values[f"model.mixer.{switch}"]:
        raise InputError(
          f"model.mixer.{switch} = False changes nothing with model.mixer.rule = "
          f"{values['model.mixer.rule']}, which has none; leave it True or use rule rls"
        )
    if values["model.mixer.write_every"] > 2 * values["model.blocks"]:
      raise InputError(
        f"model.mixer.write_every = {values['model.mixer.write_every']} is more than the "
        f"{2 * values['model.blocks']} sublayers of model.blocks = {values['model.blocks']}, so "
        "the memory would stay empty"
      )
  if values["model.vocab_size"] < 257 and values["data.source"] == "stdlib":
    raise InputError(
      f"model.vocab_size = {values['model.vocab_size']} is too small for data.source = stdlib, "
      "whose byte tokenizer has 257 ids"
    )
  prepared = values["data.source"] == "prepared"
  if prepared and not values["data.path"]:
    raise InputError("data.source = prepared needs data.path, the folder of the data set")
  for key in ("data.path", "data.tokenizer"):
    if values[key] is not None and not prepared:
      raise InputError(
        f"{key} = {values[key]} belongs to data.source = prepared, and data.source is "
        f"{values['data.source']}; set data.source or leave {key} out"
      )
  divides("train.accumulate", "data.batch_size")
  start, count = values["train.profile_start"], values["train.profile_steps"]
  if start and not count:
    raise InputError(
      f"train.profile_start = {start} traces nothing without train.profile_steps, the number of "
      "steps to trace"
    )
  if count and start + count > values["train.steps"]:
    raise InputError(
      f"train.profile_start = {start} and train.profile_steps = {count} end beyond train.steps = "
      f"{values['train.steps']}; lower one of them"
    )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
  """Settings by dotted name, such as {"model.mixer.groups": 16}."""
  flat = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      flat |= flatten(value, f"{prefix}{field.name}.")
    else:
      flat[f"{prefix}{field.name}"] = value
  return flat


def nearest(name: str, names: Iterable[str]) -> str:
  """The known name closest to a misspelt one; the same key in another section counts as closest."""
  names = list(names)
  same_key = [known for known in names if known.split(".")[-1] == name.split(".")[-1]]
  close = same_key or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
  return close[0]
