"""The arithmetic, the table and the plot, from results written by hand."""

import copy
import dataclasses
import statistics

import pytest

from ldm_jax.comparison_report import _style, draw_plot, markdown_table, summarise
from ldm_jax.config import MixerConfig
from tests.rig import tiny_comparison


def entry(mixer, rate, seed, loss, status="done"):
  curve = [{"step": s, "tokens": 256 * s, "loss": loss, "bits_per_byte": 3.0} for s in (2, 4)]
  return {
    **{"mixer": mixer, "learning_rate": rate, "seed": seed, "status": status},
    **{"loss": loss, "curve": curve if loss else [], "seconds": 60.0 * (seed + 1)},
    **{"environment": None},
  }


@pytest.fixture
def by_hand():
  """ldm is best at the lower rate, preln at the higher; preln's lower rate lost one seed."""
  comparison = tiny_comparison(learning_rates=(0.25, 0.5))
  values = {
    ("preln", 0.25): (1.0, None),
    ("preln", 0.5): (3.0, 3.5),
    ("ldm", 0.25): (2.0, 3.0),
    ("ldm", 0.5): (4.0, 5.0),
  }
  results = {
    "comparison": dataclasses.asdict(comparison),
    "runs": [
      entry(mixer, rate, seed, loss, "done" if loss else "diverged")
      for (mixer, rate), pair in values.items()
      for seed, loss in enumerate(pair)
    ],
    "parameters": {"preln": 200, "ldm": 250},
    "timing": {
      **{"rounds": 3, "measured_on": "a table"},
      "median_seconds": {"preln": 2.0, "ldm": 3.0},
      "temporary_bytes": {"preln": 100, "ldm": 400},
    },
    "wall_seconds": 720.0,
  }
  return results


def test_best_rates_means_deviations_and_paired_differences(by_hand):
  ldm, preln = summarise(by_hand)
  assert (ldm["mixer"], ldm["best_rate"], ldm["loss"], ldm["seeds"]) == ("ldm", 0.25, 2.5, [0, 1])
  assert ldm["loss_sd"] == pytest.approx(0.5**0.5)
  assert ldm["difference"] == statistics.mean((2.0 - 3.0, 3.0 - 3.5)) == -0.75
  assert ldm["difference_sd"] == pytest.approx(statistics.stdev((-1.0, -0.5)))
  assert (ldm["parameters"], ldm["parameters_percent"]) == (250, 25.0)
  assert (ldm["step_time_ratio"], ldm["temporary_memory_ratio"]) == (1.5, 4.0)
  assert ldm["minutes_per_run"] == 1.5
  # Its mean over the one seed that did not diverge is lower, but a rate must hold for all seeds.
  assert (preln["best_rate"], preln["loss"], preln["difference"]) == (0.5, 3.25, 0.0)
  assert preln["by_rate"] == [
    {"learning_rate": 0.25, "loss": 1.0, "finished": 1, "diverged": 1},
    {"learning_rate": 0.5, "loss": 3.25, "finished": 2, "diverged": 0},
  ]


def test_the_table_of_results_made_by_hand(by_hand):
  by_hand["summary"] = summarise(by_hand)
  assert [line for line in markdown_table(by_hand).splitlines() if line.startswith("| ")][2:] == [
    "| ldm | 2.5000 ± 0.7071 | -0.7500 ± 0.3536 | 0.25 | 0.5: 4.5000 | 250 (+25.0 %) | 1.50 | 4.00 "
    "| 1.5 |",
    "| preln | 3.2500 ± 0.3536 |  | 0.5 | 0.25: 1.0000 (1 diverged) | 200 | 1.00 | 1.00 | 1.3 |",
  ]


def test_missing_seeds_and_rates_are_counted_and_compared_where_both_are(by_hand):
  for run in by_hand["runs"]:
    gone = {("ldm", 0.25, 0), ("ldm", 0.5, 0), ("ldm", 0.5, 1)}
    if (run["mixer"], run["learning_rate"], run["seed"]) in gone:
      run.update(status="unfinished", loss=None, curve=[])
  del by_hand["timing"], by_hand["parameters"]
  by_hand["summary"] = ldm, _ = summarise(by_hand)
  assert (ldm["loss"], ldm["seeds"], ldm["difference"], ldm["loss_sd"]) == (3.0, [1], -0.5, None)
  table = markdown_table(by_hand)
  assert "**3 of 8 runs are missing.**" in table
  assert (
    "| ldm | 3.0000 ± n/a (1 of 2 seeds) | -0.5000 | 0.25 | 0.5: missing | n/a | n/a |" in table
  )
  assert draw_plot(by_hand).startswith(b"\x89PNG")
  without = copy.deepcopy(by_hand)
  for run in without["runs"]:
    run.update(status="unfinished", loss=None, curve=[])
  without["summary"] = summarise(without)
  assert [row["status"] for row in without["summary"]] == ["missing", "missing"]
  assert "| preln | missing |  | n/a | 0.25: missing; 0.5: missing |" in markdown_table(without)
  assert draw_plot(without) is None


def test_many_mixers_have_lines_of_their_own(by_hand):
  mixers = {f"m{i}": MixerConfig(groups=4) for i in range(20)} | tiny_comparison().mixers
  by_hand["comparison"]["mixers"] = mixers
  by_hand["runs"] += [entry(f"m{i}", 0.25, seed, 2.0 + i / 8) for i in range(20) for seed in (0, 1)]
  by_hand["summary"] = summarise(by_hand)
  assert draw_plot(by_hand).startswith(b"\x89PNG")
  styles = [_style(by_hand["comparison"], mixer) for mixer in mixers]
  assert len({(style["color"], style["linestyle"]) for style in styles}) == 22
