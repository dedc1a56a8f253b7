"""Every setting of a run: frozen dataclasses, checked once, saved with the run as JSON.

A config file is a Python file with `get_config() -> Config`.  On the command line each setting is
`--section.key VALUE`; `train.py --help` lists them with these docstrings.
"""

import dataclasses
import difflib
import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, Literal

from ldm_jax.config_checks import (
  check_combinations,
  check_ranges,
  check_types,
  flatten,
  nearest,
)
from ldm_jax.errors import InputError
from ldm_jax.typing import PathLike


@dataclasses.dataclass(frozen=True)
class MixerConfig:
  """How information crosses layers."""

  kind: Literal["preln", "ldm", "attnres", "hc", "mhc"] = "ldm"
  """The mechanism: plain residual stream, linear depth memory, attention residuals,
  hyper-connections, manifold-constrained hyper-connections. A setting below belongs to ldm unless
  it names another kind."""
  rule: Literal["rls", "delta", "outer"] = "rls"
  """How a sublayer's output enters the memory: exact regression, one gradient step, or a sum."""
  groups: int = 16
  """G: slices of the width with a memory of their own. Must divide model.width."""
  key_dim: int = 8
  """K: key width of one group."""
  shared_key: bool = False
  """One key for all groups instead of one each."""
  latent_dim: int = 64
  """R: width of the two latents that queries and keys come from."""
  alpha: float = 1.0
  """Inverse ridge strength, at most 100 (rule rls): the covariance P starts at alpha x identity."""
  min_forgetting: float = 0.5
  """Lower bound of the learned forgetting factors (rule rls)."""
  forgetting_init: float = 0.98
  """Forgetting factors at initialisation (rule rls)."""
  gain_init: float = 0.0
  """Read gain at initialisation (readout add). 0 starts as PreLN; 1 trains better from scratch."""
  key_bias_init: float = 0.0
  """Every component of the key and query biases at initialisation. The larger, the more alike keys
  and queries start, and the closer a read is to the mean of the outputs so far."""
  memory_dtype: Literal["float32", "bfloat16"] = "float32"
  """How the memory is carried between sublayers."""
  readout: Literal["add", "memory_only"] = "add"
  """What a sublayer reads: x + gain * gate * M q, or M q alone (ablation)."""
  residual: bool = True
  """False replaces x + v by v in the residual stream (ablation)."""
  forgetting: bool = True
  """False holds the forgetting factors at 1 (rule rls; ablation)."""
  importance: bool = True
  """False holds the importance of every write at 1 (rule rls; ablation)."""
  write_embedding: bool = False
  """Whether the embedding is the memory's first record; False starts from an empty memory."""
  write_every: int = 1
  """Sublayers per write; 2 writes the sum of a block's two outputs once (ablation)."""
  form: Literal["auto", "reference", "state", "chunked", "history", "kernel"] = "auto"
  """How the memory is computed; the numbers are the same, see the README. auto goes by cost."""
  chunk: int | None = None
  """The most writes that the forms chunked and kernel put off; None leaves it to the cost rule."""
  block_size: int = 6
  """Sublayers summed into one source (kind attnres); 1 keeps every output, the full form."""
  streams: int = 4
  """N: residual streams (kinds hc and mhc)."""
  dynamic: bool = True
  """Whether the connections depend on the token (kind hc)."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder-only transformer around the mixers."""

  width: int = 1024
  """D: model width."""
  blocks: int = 24
  """Transformer blocks; each is an attention and an MLP sublayer."""
  heads: int = 16
  """H: query heads. Must divide width."""
  kv_heads: int | None = None
  """Key/value heads, a divisor of heads; None for as many as heads."""
  mlp_width: int = 2816
  """F: hidden width of the SwiGLU MLP."""
  vocab_size: int = 257
  """Token ids; 257 is the byte tokenizer. Padded to a multiple of 128 inside."""
  tie_embeddings: bool = False
  """Use the embedding matrix as output head."""
  qk_norm: bool = False
  """RMSNorm on queries and keys of each head."""
  rope_theta: float = 10_000.0
  """Base of the rotary wavelengths."""
  attention: Literal["auto", "plain", "splash"] = "auto"
  """plain holds all T x T logits; splash, a flash kernel for TPUs, does not. auto takes splash if
  the program is for TPUs and T a multiple of 128 on each device, else plain."""
  dropout: float = 0.0
  """Fraction of the embeddings and of every sublayer's outputs set to zero in training."""
  mixer: MixerConfig = MixerConfig()

  @property
  def sublayers(self) -> int:
    """L = 2 x blocks."""
    return 2 * self.blocks

  @property
  def padded_vocab_size(self) -> int:
    """The vocabulary rounded up to a multiple of 128."""
    return -(-self.vocab_size // 128) * 128


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from."""

  source: Literal["stdlib", "prepared", "synthetic"] = "stdlib"
  """stdlib: the .py files of this Python's standard library, as bytes. prepared: a folder made by
  python -m ldm_jax.data.prepare. synthetic: random ids, for speed tests."""
  path: str | None = None
  """Folder of the data set (source prepared)."""
  tokenizer: str | None = None
  """'bytes' or a tokenizer file that the data set must have been made with; None takes its own
  (source prepared)."""
  sequence_length: int = 256
  """T: tokens in a row."""
  batch_size: int = 8
  """Rows in a step, over all devices and accumulation steps."""
  seed: int = 0
  """Order of the rows."""
  workers: int = 0
  """Processes that load batches ahead; 0 for a thread of the training process."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with linear warm-up and cosine decay."""

  learning_rate: float = 1e-3
  """Peak rate."""
  warmup_steps: int = 100
  """Steps of linear warm-up; from train.steps on, the rate only rises."""
  final_fraction: float = 0.1
  """Rate at the last step, as a fraction of the peak."""
  weight_decay: float = 0.1
  """Decoupled decay of weight matrices; norms, biases, gains, gates and queries have none."""
  beta1: float = 0.9
  """Decay of the first moment."""
  beta2: float = 0.95
  """Decay of the second moment."""
  clip_norm: float = 1.0
  """Largest global gradient norm."""
  z_loss: float = 0.0
  """Weight of the squared log-partition in the loss."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The training loop."""

  steps: int = 1000
  """Optimizer steps; also the length of the learning-rate schedule."""
  log_every: int = 10
  """Steps between train lines of metrics.jsonl."""
  eval_every: int = 250
  """Steps between evaluations; one more follows the last step."""
  eval_batches: int = 16
  """Batches of held-out rows in an evaluation; 0 for all of them."""
  depth_metrics_every: int = 0
  """Steps between depth lines of metrics.jsonl: sizes of streams, outputs and gradients at every
  sublayer; 0 for none. Each takes about as long as a step."""
  profile_start: int = 0
  """Steps before the profiler starts."""
  profile_steps: int = 0
  """Steps that the profiler traces into WORKDIR/profile; 0 for none."""
  checkpoint_every: int = 250
  """Steps between checkpoints; one more follows the last step."""
  keep: int = 3
  """Newest checkpoints to keep."""
  keep_best: bool = False
  """Also keep the state of the lowest held-out loss so far, in the workdir's folder best/."""
  accumulate: int = 1
  """Parts a batch is computed in, one after another, to save memory."""
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  """Dtype of activations and matrix products; parameters and moments are float32."""
  remat: Literal["none", "dots", "full"] = "none"
  """What a block recomputes in the backward pass: nothing; all but weight products and the
  attention kernel; or everything, but that ldm, hc and mhc keep the outputs of the sublayers."""
  seed: int = 0
  """Initial weights and dropout."""
  sample_tokens: int = 200
  """Length of the text sample at the end; 0 for none."""
  platform: Literal["any", "cpu", "gpu", "tpu"] = "any"
  """What the run must find to run on; "any" refuses only a TPU that JAX leaves unused."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each way of splitting the work; -1 takes the rest."""

  data: int = -1
  """Batch split, parameters replicated."""
  fsdp: int = 1
  """Batch split, parameters and optimizer state split too."""
  tensor: int = 1
  """Heads, MLP, vocabulary and memory groups split."""
  sequence: int = 1
  """Positions split."""


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()

  def validate(self) -> "Config":
    """Checks types, ranges and combinations; returns itself.

    Raises:
      InputError: naming the setting, its value, and what would do.
    """
    check_types(self)
    check_ranges(flatten(self))
    check_combinations(flatten(self))
    return self


def load_config(path: PathLike) -> Config:
  """Runs a config file and checks what its `get_config()` returns.

  Raises:
    InputError: if the file is missing or broken, misspells a setting, or the config is not valid.
  """
  return load_from_file(path, "get_config", Config)


def load_from_file(path: PathLike, function_name: str, expected_class: type) -> Any:
  """Runs a Python file and checks what its `function_name()` returns.

  Args:
    path: the file; it may import its neighbours by name.
    function_name: called without arguments.
    expected_class: a dataclass with `validate()`, which the function must return an instance of.

  Raises:
    InputError: if the file is missing or broken, misspells a setting, or the result is not valid.
  """
  path = Path(path)
  if not path.is_file():
    raise InputError(f"config file {path} does not exist{_suggest_file(path)}")
  try:
    namespace = _run_file(path)
    if function_name not in namespace:
      raise InputError(f"config file {path} has no {function_name}() function")
    result = namespace[function_name]()
  except InputError:
    raise
  except Exception as error:
    raise InputError(f"config file {path}: {_explain(error, expected_class)}") from error
  if not isinstance(result, expected_class):
    raise InputError(
      f"config file {path}: {function_name}() must return a {expected_class.__name__}, "
      f"got {type(result)}"
    )
  try:
    return result.validate()
  except InputError as error:
    raise InputError(f"config file {path}: {error}") from error


def _run_file(path):
  """Runs a config file; it may import its neighbours by name (`import ldm_tiny`)."""
  folder = str(path.resolve().parent)
  sys.path.insert(0, folder)
  try:
    return runpy.run_path(str(path))
  finally:
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):  # the next folder may use the same names
      if os.path.dirname(getattr(module, "__file__", None) or "") == folder:
        del sys.modules[name]


def _suggest_file(path):
  others = [str(p.with_suffix("").name) for p in path.parent.glob("*.py")]
  close = difflib.get_close_matches(path.stem, others, n=1, cutoff=0.0)
  return f"; the nearest is {path.parent / close[0]}.py" if close else ""


def _explain(error, expected_class):
  match = re.search(r"^(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
  classes = {cls.__name__: cls for cls in (expected_class, Config, *_sections(Config))}
  if isinstance(error, TypeError) and match and match[1] in classes:
    names = [field.name for field in dataclasses.fields(classes[match[1]])]
    return f"{match[1]} has no setting {match[2]!r}; did you mean {nearest(match[2], names)!r}?"
  return f"{type(error).__name__}: {error}"


def _sections(cls):
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(field.type):
      yield field.type
      yield from _sections(field.type)


def with_section(config: Config, section: str, **settings: Any) -> Config:
  """The same run with other settings in one section, such as "train"."""
  changed = dataclasses.replace(getattr(config, section), **settings)
  return dataclasses.replace(config, **{section: changed})


def with_mixer(config: Config, **settings: Any) -> Config:
  """The same run with other mixer settings: `with_mixer(config, kind="mhc")`.

  Raises:
    TypeError: for a setting that `MixerConfig` does not have.
  """
  mixer = dataclasses.replace(config.model.mixer, **settings)
  return with_section(config, "model", mixer=mixer)


def to_json(config: Config) -> str:
  """The resolved config as JSON, sections nested."""
  return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
  """The inverse of `to_json`.

  Raises:
    InputError: if the text is not JSON, or has a setting that this version does not know.
  """

  def build(cls, values):
    if not isinstance(values, dict):
      raise InputError(f"{cls.__name__} must be a JSON object, got {values!r}")
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    for name in values:
      if name not in known:
        raise InputError(
          f"{cls.__name__} has no setting {name!r} (nearest: {nearest(name, known)})"
        )
    return cls(
      **{
        name: build(known[name], value) if dataclasses.is_dataclass(known[name]) else value
        for name, value in values.items()
      }
    )

  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise InputError(f"not valid JSON: {error}") from error
  return build(Config, values).validate()
