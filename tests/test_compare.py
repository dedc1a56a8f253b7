"""A comparison trains what it says, goes on after a stop, and reports what the runs did."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import sys
from types import SimpleNamespace

import jax
import pytest

from ldm_jax import compare as command
from ldm_jax.compare import compare
from ldm_jax.comparison import Run
from ldm_jax.config import to_json
from ldm_jax.errors import DivergedError, InputError, TrainingError
from ldm_jax.training import loop
from ldm_jax.training import run as training_run
from tests.rig import refusal, signal_at, tiny_comparison, tiny_config

COMPARISON_FILE = """
from ldm_jax.compare import Comparison
from tests.rig import tiny_comparison
def get_comparison():
  return tiny_comparison()
"""


def run_main(*arguments):
  """The command in this process: exit code, stdout, stderr."""
  out, err = io.StringIO(), io.StringIO()
  with (
    pytest.MonkeyPatch.context() as patch,
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    patch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    code = command.main()
  return code, out.getvalue(), err.getvalue()


def read(out):
  return json.loads((out / "results.json").read_text())


def losses(results):
  return {run["folder"]: (run["status"], run["loss"], run["curve"]) for run in results["runs"]}


@pytest.fixture(scope="module", autouse=True)
def cheap():
  """Reads the corpus once, and keeps what the tests of this worker have compiled."""
  load = functools.cache(lambda: run_load(tiny_comparison().base))
  run_load = training_run.load_dataset
  with pytest.MonkeyPatch.context() as patch:
    for module in (training_run, command):
      patch.setattr(
        module, "load_dataset", lambda config: dataclasses.replace(load(), seed=config.data.seed)
      )
    patch.setattr(jax, "clear_caches", lambda: None)
    yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Two mixers and two seeds, by the command."""
  folder = tmp_path_factory.mktemp("whole")
  (folder / "mine.py").write_text(COMPARISON_FILE)
  out = folder / "out"
  code, stdout, stderr = run_main("--config", folder / "mine.py", "--out", out, "--json")
  return SimpleNamespace(
    code=code, out=out, stdout=stdout, stderr=stderr, file=folder / "mine.py", results=read(out)
  )


def test_a_whole_comparison_writes_results_table_and_plot(whole):
  results = whole.results
  assert whole.code == 0
  assert results["schema"] == 1
  assert results["comparison"]["seeds"] == [0, 1]
  assert [run["folder"] for run in results["runs"]] == [
    f"runs/{mixer}-lr0.01-seed{seed}" for seed in (0, 1) for mixer in ("preln", "ldm")
  ]
  for run in results["runs"]:
    assert run["seconds"] > 0
    assert run["environment"]["jax"] == jax.__version__
    assert (run["status"], run["message"]) == ("done", None)
    assert [(p["step"], p["tokens"]) for p in run["curve"]] == [(2, 512), (4, 1024)]
    assert run["loss"] == run["curve"][-1]["loss"] < 5.6
  assert results["parameters"]["ldm"] > results["parameters"]["preln"] > 1000
  assert results["timing"]["rounds"] == 1
  assert results["timing"]["median_seconds"].keys() == {"preln", "ldm"}
  assert [row["best_rate"] for row in results["summary"]] == [0.01, 0.01]
  assert (whole.out / "loss.png").read_bytes().startswith(b"\x89PNG")
  assert not list(whole.out.rglob("*.tmp"))


def test_the_table_says_what_was_equal(whole):
  lines = (whole.out / "table.md").read_text().splitlines()
  assert lines[0].startswith("Equal for all: 1 blocks of width 32, 4 heads, MLP 64")
  assert "4 steps of 8 x 32 tokens, 1,024 tokens per run" in lines[0]
  assert f"seeds 0, 1; peak rates 0.01. Run on 8 x cpu, jax {jax.__version__}" in lines[0]
  table = [line for line in lines if line.startswith("|")]
  assert len(table) == 4
  assert all(line.count("|") == 10 for line in table)
  (baseline,) = (line for line in table if line.startswith("| preln |"))
  assert "|  | 0.01 |  |" in baseline
  assert "| 1.00 | 1.00 |" in baseline
  assert "missing" not in "".join(lines)


def test_with_json_stdout_is_the_results_and_progress_goes_to_stderr(whole):
  assert json.loads(whole.stdout) == whole.results
  assert whole.stdout.count("\n") == 1
  assert "[1/4] preln, rate 0.01, seed 0\n" in whole.stderr
  assert "[4/4] ldm, rate 0.01, seed 1, about 0" in whole.stderr
  assert "step 4  held-out loss" in whole.stderr


def test_a_run_is_what_train_gives(whole, tmp_path):
  config = tiny_comparison().config(Run("preln", 1e-2, 1))
  assert (config.model.mixer.kind, config.optimizer.learning_rate) == ("preln", 1e-2)
  assert (config.data.seed, config.train.seed) == (1, 1)
  assert loop.train(config, tmp_path) == 0
  mine, theirs = (
    [
      {k: v for k, v in json.loads(line).items() if k != "tokens_per_second"}
      for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    for folder in (tmp_path, whole.out / "runs" / "preln-lr0.01-seed1")
  )
  assert mine == theirs
  (run,) = (run for run in whole.results["runs"] if run["folder"] == "runs/preln-lr0.01-seed1")
  assert run["loss"] == mine[-1]["loss"]


def test_all_mixers_see_the_same_batches(whole):
  hashes = {}
  for run in whole.results["runs"]:
    lines = (whole.out / run["folder"] / "metrics.jsonl").read_text().splitlines()
    train = [line for line in map(json.loads, lines) if line["split"] == "train"]
    hashes.setdefault(run["seed"], set()).add(tuple(line["batch_hash"] for line in train))
  assert all(len(of_one_seed) == 1 for of_one_seed in hashes.values())
  assert len(set.union(*hashes.values())) == len(hashes)


def test_the_compilation_cache_is_used_and_put_away(whole, tmp_path):
  assert list((whole.out / "compilation_cache").glob("jit_train_step-*"))
  assert jax.config.jax_compilation_cache_dir is None
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  try:
    with command.compilation_cache(whole.out):
      assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
  finally:
    jax.config.update("jax_compilation_cache_dir", None)


def refuse(*args):
  raise AssertionError("there was nothing left to do")


def test_a_second_call_does_nothing(whole, monkeypatch):
  for name in ("train", "StepTimer", "abstract_state"):
    monkeypatch.setattr(command, name, refuse)
  files = [path for path in sorted(whole.out.rglob("*")) if path.is_file()]
  before = [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]
  code, stdout, stderr = run_main("--config", whole.file, "--out", whole.out)
  assert (code, stderr) == (0, "")
  assert "4 of 4 runs have ended already" in stdout
  assert before == [(path, path.read_bytes(), path.stat().st_mtime_ns) for path in files]


@pytest.mark.slow
def test_a_stopped_comparison_goes_on_to_the_same_losses(whole, tmp_path, capsys):
  out = tmp_path / "out"
  shutil.copytree(whole.out, out)
  shutil.rmtree(out / "runs" / "preln-lr0.01-seed1")
  with pytest.MonkeyPatch.context() as patch:
    signal_at(patch, 3, signal.SIGTERM)
    code, results = compare(tiny_comparison(), out)
  assert code == 75
  assert "the same command resumes" in capsys.readouterr().out.splitlines()[-1]
  assert results == read(out)
  (stopped,) = (run for run in results["runs"] if run["status"] == "unfinished")
  assert (stopped["folder"], stopped["loss"]) == ("runs/preln-lr0.01-seed1", None)
  assert "**1 of 4 runs are missing.**" in (out / "table.md").read_text()
  assert "(1 of 2 seeds)" in (out / "table.md").read_text()

  code, results = compare(tiny_comparison(), out)
  assert code == 0
  assert "3 of 4 runs have ended already" in capsys.readouterr().out
  assert losses(results) == losses(whole.results)
  assert results["timing"] == whole.results["timing"]
  (resumed,) = (r for r in results["runs"] if r["folder"] == stopped["folder"])
  assert resumed["seconds"] > stopped["seconds"] > 0


def test_a_rate_at_which_a_run_diverges_is_recorded(whole, tmp_path):
  out = tmp_path / "out"
  shutil.copytree(whole.out, out)
  comparison = tiny_comparison(learning_rates=(1e25, 1e-2), seeds=(0,))
  comparison = dataclasses.replace(comparison, mixers={"preln": comparison.mixers["preln"]})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(command._Session, "time_steps", lambda self, stop: True)
    code, results = compare(comparison, out)
  assert code == 0
  diverged, done = results["runs"]
  assert (diverged["status"], diverged["loss"], diverged["curve"]) == ("diverged", None, [])
  assert "is not finite" in diverged["message"]
  assert done == whole.results["runs"][0]
  assert results["summary"][0]["best_rate"] == 1e-2
  assert "| 0.01 | 1e+25: diverged |" in (out / "table.md").read_text()


class FakeTraining:
  """Stands for `train` and what measures steps: quick, and with losses that the config gives."""

  def __init__(self, monkeypatch):
    self.calls, self.act, self.loss = [], lambda config, workdir: 0, 2.0
    monkeypatch.setattr(command, "train", self.train)
    timer = SimpleNamespace(measure=lambda: None, median=0.5, temporary_bytes=1024)
    monkeypatch.setattr(command, "StepTimer", lambda config: timer)
    monkeypatch.setattr(command, "abstract_state", lambda *args: SimpleNamespace(params=[]))
    monkeypatch.setattr(command, "draw_plot", lambda results: None)

  def train(self, config, workdir):
    self.calls.append(workdir.name)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(to_json(config))
    code = self.act(config, workdir)
    if code == 0:
      self.finish(config, workdir)
    return code

  def finish(self, config, workdir):
    loss = self.loss + config.optimizer.learning_rate + config.train.seed / 8
    lines = [
      {"step": step, "split": "eval", "loss": loss, "bits_per_byte": 3.0}
      for step in (2, config.train.steps)
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def fake(monkeypatch):
  return FakeTraining(monkeypatch)


def test_more_mixers_rates_and_seeds_leave_what_is_there_alone(fake, tmp_path, capsys):
  small = tiny_comparison(learning_rates=(0.25,), seeds=(0,))
  assert compare(small, tmp_path)[0] == 0
  assert fake.calls == ["preln-lr0.25-seed0", "ldm-lr0.25-seed0"]
  assert read(tmp_path)["summary"][0]["loss_sd"] is None
  assert "2.2500 ± n/a" in (tmp_path / "table.md").read_text()
  mixers = {**small.mixers, "k2": dataclasses.replace(small.mixers["ldm"], key_dim=2)}
  larger = dataclasses.replace(small, mixers=mixers, seeds=(0, 1))
  code, results = compare(larger, tmp_path)
  assert code == 0
  new = ["k2-lr0.25-seed0", *(f"{name}-lr0.25-seed1" for name in mixers)]
  assert fake.calls[2:] == new
  assert results["timing"]["median_seconds"].keys() == mixers.keys()
  assert "[4/6] preln, rate 0.25, seed 1, about 00:00 of training left" in capsys.readouterr().out


def test_a_stop_between_runs_or_while_timing_starts_nothing_more(fake, tmp_path, monkeypatch):
  comparison = tiny_comparison(learning_rates=(0.25,), seeds=(0,))

  def finish_and_stop(config, workdir):
    os.kill(os.getpid(), signal.SIGINT)
    return 0

  fake.act = finish_and_stop
  assert compare(comparison, tmp_path)[0] == 75
  assert fake.calls == ["preln-lr0.25-seed0"]
  assert [run["status"] for run in read(tmp_path)["runs"]] == ["done", "unfinished"]
  assert compare(comparison, tmp_path)[0] == 75
  assert len(fake.calls) == 2
  assert read(tmp_path)["timing"] is None
  assert compare(comparison, tmp_path)[0] == 0
  assert len(fake.calls) == 2
  assert read(tmp_path)["timing"]["temporary_bytes"] == {"preln": 1024, "ldm": 1024}


def test_a_divergence_is_tried_again_only_when_its_folder_is_deleted(fake, tmp_path):
  comparison = tiny_comparison(learning_rates=(0.25,), seeds=(0,))

  def diverge(config, workdir):
    if config.model.mixer.kind == "ldm":
      return 0
    raise DivergedError("step 2: loss nan; first parameter that is not finite: x (1 are not)")

  fake.act = diverge
  code, results = compare(comparison, tmp_path)
  assert code == 0
  assert [run["status"] for run in results["runs"]] == ["diverged", "done"]
  assert [row["status"] for row in results["summary"]] == ["finished", "diverged"]
  assert "| preln | diverged |  | n/a | 0.25: diverged |" in (tmp_path / "table.md").read_text()
  assert compare(comparison, tmp_path)[0] == 0
  assert len(fake.calls) == 2
  shutil.rmtree(tmp_path / "runs" / "preln-lr0.25-seed0")
  fake.act = lambda config, workdir: 0
  assert [run["status"] for run in compare(comparison, tmp_path)[1]["runs"]] == ["done", "done"]


def test_a_full_disk_ends_the_comparison_and_is_no_divergence(fake, tmp_path, monkeypatch):
  def fail(config, workdir):
    raise TrainingError("writing metrics failed, not finite") from OSError(28, "No space left")

  fake.act = fail
  with pytest.raises(TrainingError, match="writing metrics failed"):
    compare(tiny_comparison(), tmp_path)
  assert {run["status"] for run in read(tmp_path)["runs"]} == {"unfinished"}
  fake.act = lambda config, workdir: 0
  original = command._write

  def full(path, data):
    if path.name == "table.md" and b"2.0100" in data:
      raise OSError(28, "No space left on device")
    original(path, data)

  monkeypatch.setattr(command, "_write", full)
  with pytest.raises(TrainingError, match=r"writing results in .*No space left.*same command"):
    compare(tiny_comparison(), tmp_path)
  monkeypatch.setattr(command, "_write", original)
  assert compare(tiny_comparison(), tmp_path)[0] == 0
  assert len(fake.calls) == 1 + 4


def test_settings_of_another_mixer_do_not_tell_runs_apart(fake, tmp_path):
  comparison = tiny_comparison(seeds=(0,), learning_rates=(0.25,))
  compare(comparison, tmp_path)
  trained = len(fake.calls)
  mixers = {
    name: dataclasses.replace(mixer, streams=7, gain_init=0.125)
    for name, mixer in comparison.mixers.items()
  }
  unaffected = dataclasses.replace(comparison, mixers={"preln": mixers["preln"]})
  assert compare(unaffected, tmp_path)[0] == 0
  assert len(fake.calls) == trained
  with pytest.raises(InputError, match=r"mixer.gain_init was 0.0 and is now 0.125\. Choose"):
    compare(dataclasses.replace(comparison, mixers=mixers), tmp_path)


def test_runs_with_other_settings_are_refused_by_name(fake, tmp_path):
  comparison = tiny_comparison(seeds=(0,), learning_rates=(0.25,))
  compare(comparison, tmp_path)
  before = (tmp_path / "results.json").read_bytes()
  changed = dataclasses.replace(comparison, base=tiny_config("preln", steps=5))
  message = r"preln-lr0.25-seed0 holds a run with other settings: .*train.steps was 4 and is now 5"
  with pytest.raises(InputError, match=message + ".*another --out, or delete"):
    compare(changed, tmp_path)
  assert (tmp_path / "results.json").read_bytes() == before
  (tmp_path / "runs" / "preln-lr0.25-seed0" / "config.json").unlink()
  with pytest.raises(InputError, match=r"config.json.*restore the file or delete the folder"):
    compare(comparison, tmp_path)


def test_runs_on_other_data_are_refused(fake, tmp_path, monkeypatch):
  compare(tiny_comparison(seeds=(0,)), tmp_path)
  monkeypatch.setattr(command, "load_dataset", lambda config: SimpleNamespace(fingerprint="other"))
  with pytest.raises(InputError, match=r"preln-lr0.01-seed0 was trained on other data .*now other"):
    compare(tiny_comparison(), tmp_path)
  assert len(fake.calls) == 2


def test_a_held_out_loss_that_is_not_finite_is_a_divergence(fake, tmp_path):
  fake.loss = float("nan")
  code, results = compare(tiny_comparison(), tmp_path)
  assert code == 0
  assert {(r["status"], r["loss"], len(r["curve"])) for r in results["runs"]} == {
    ("diverged", None, 0)
  }
  assert "held-out loss" in results["runs"][0]["message"]
  assert {row["status"] for row in results["summary"]} == {"diverged"}


def test_time_that_a_killed_process_spent_is_unknown_not_nothing(fake, tmp_path):
  comparison = tiny_comparison(seeds=(0,), learning_rates=(0.25,))
  begun = tmp_path / "runs" / "preln-lr0.25-seed0"
  (begun / "checkpoints" / "2").mkdir(parents=True)
  (begun / "config.json").write_text(to_json(comparison.config(Run("preln", 0.25, 0))))
  (begun / "metrics.jsonl").write_text('{"step": 2, "split": "ev')
  (tmp_path / "results.json").write_text("damaged")
  _, results = compare(comparison, tmp_path)
  assert [run["seconds"] is None for run in results["runs"]] == [True, False]
  assert {row["mixer"]: row["minutes_per_run"] is None for row in results["summary"]} == {
    "preln": True,
    "ldm": False,
  }


def test_an_unusable_out_is_refused(tmp_path):
  (tmp_path / "file").write_text("x")
  with pytest.raises(InputError, match=r"--out .*file: cannot write there"):
    compare(tiny_comparison(), tmp_path / "file")


def test_bad_input_exits_with_2_and_one_message(tmp_path):
  (tmp_path / "mine.py").write_text(COMPARISON_FILE.replace("()\n", "(baseline='lmd')\n"))
  command = ("-m", "ldm_jax.compare", "--config", "mine.py", "--out", "out")
  assert refusal(*command, cwd=tmp_path) == (
    "error: config file mine.py: baseline = 'lmd' is not one of the mixers; the nearest is 'ldm'"
  )
  assert not (tmp_path / "out").exists()
