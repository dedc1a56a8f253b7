"""A comparison that cannot be is refused by name; every file in configs/ can."""

import pytest

from ldm_jax.compare import compare
from ldm_jax.comparison import load_comparison
from ldm_jax.config import MixerConfig
from ldm_jax.errors import InputError
from tests.rig import ROOT, tiny_comparison, tiny_config


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mixers": {}}, "mixers must be a dict from at least one name"),
    ({"mixers": {"a/b": MixerConfig()}}, "'a/b' names a folder; use letters"),
    ({"mixers": {"..": MixerConfig()}}, "'..' names a folder"),
    ({"mixers": {"preln": "preln"}}, "mixer 'preln' must be a MixerConfig, got 'preln'"),
    ({"mixers": {"preln": MixerConfig(groups=4), "PreLN": MixerConfig(groups=4)}}, "upper and low"),
    ({"mixers": {"preln": MixerConfig(kind="perln")}}, "mixer 'preln': model.mixer.kind: expected"),
    (
      {"mixers": {"preln": MixerConfig(groups=5)}},
      "mixer 'preln': model.mixer.groups = 5 does not",
    ),
    ({"baseline": "plern"}, "baseline = 'plern' is not one of the mixers; the nearest is 'preln'"),
    ({"seeds": ()}, "seeds is empty"),
    ({"seeds": (0, 0)}, "seeds has the same value twice"),
    ({"seeds": (0.5,)}, "seeds must be a tuple of ints"),
    ({"seeds": (True,)}, "seeds must be a tuple of ints"),
    ({"seeds": 3}, "seeds must be a tuple of ints, got 3"),
    ({"seeds": (-1,)}, r"data.seed must be at least 0"),
    ({"learning_rates": ()}, "learning_rates is empty"),
    ({"learning_rates": (1e-2, 1.0000001e-2)}, "learning_rates has the same value twice"),
    ({"learning_rates": (1e-2, -1e-2)}, "learning_rates must be positive"),
    ({"learning_rates": (float("nan"),)}, "learning_rates must be positive and finite"),
    ({"learning_rates": ("fast",)}, "learning_rates must be a tuple of floats"),
    ({"timing_rounds": 0}, "timing_rounds must be an int of at least 1"),
    ({"base": None}, "base must be a Config"),
    ({"base": tiny_config(steps=0)}, "train.steps must be at least 1"),
  ],
)
def test_impossible_comparisons_are_refused_by_name(changes, message, tmp_path):
  with pytest.raises(InputError, match=message):
    compare(tiny_comparison(**changes), tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ("x = 1", r"mine.py has no get_comparison\(\) function"),
    ("def get_comparison():\n  return 3", "mine.py: .* must return a Comparison"),
    (
      "def get_comparison():\n  return Comparison(mixer=3)",
      "no setting 'mixer'; did you mean 'mix",
    ),
    ("def get_comparison():\n  return MixerConfig(kidn='ldm')", "did you mean 'kind'"),
    (
      "def get_comparison():\n  return Comparison(Config(), {}, (0,), (1e-3,))",
      "mine.py: mixers mu",
    ),
  ],
)
def test_broken_comparison_files_are_refused_with_their_name(tmp_path, body, message):
  path = tmp_path / "mine.py"
  path.write_text(
    "from ldm_jax import Config, MixerConfig\nfrom ldm_jax.compare import Comparison\n" + body
  )
  with pytest.raises(InputError, match=message):
    load_comparison(path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("compare_*.py")), ids=str)
def test_every_comparison_file_is_valid(path):
  comparison = load_comparison(path)
  assert path.read_text().startswith('"""')
  assert len({run.folder for run in comparison.runs()}) == len(comparison.runs())
