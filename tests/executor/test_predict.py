"""Length prediction: what is learnt, how its error is measured, and the command line around it."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_encoder import save_small_distilbert

from batchbound.cli import main
from batchbound.data.arrays import IntArray
from batchbound.data.files.disk import InputError
from batchbound.data.predictor import Examples, Predicted, PredictionQuality, bucket_of
from batchbound.executor.predictors.encoder import EncoderPredictor
from batchbound.executor.predictors.predictor import METHODS, TrainedPredictor, learn
from batchbound.executor.predictors.quantiles import QuantilePredictor


def texts(count: int, seed: int = 0) -> Examples:
    """Prompts that ask for so many words, and answers of about that length."""
    rng = np.random.default_rng(seed)
    asked = rng.integers(1, 8, count)
    lengths = np.maximum(1, (asked * 20 * np.exp(0.1 * rng.standard_normal(count))).round()).astype(np.int64)
    prompts = tuple(f"Write {'many ' * a}words, please. Number {i}." for i, a in enumerate(asked.tolist()))
    return Examples(prompts, lengths)


def tokens(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def test_labels_are_the_papers() -> None:
    # l_max = 1024, N = 10: ranges of 102.4 tokens.
    assert bucket_of(tokens(1, 102, 103, 1023, 5000), 1024, 10).tolist() == [0, 0, 1, 9, 9]


def test_quality_counts_what_it_says() -> None:
    predicted = Predicted(tokens(10, 20, 30, 40), tokens(5, 5, 29, 39), tokens(15, 25, 31, 41))
    quality = PredictionQuality.measured(predicted, tokens(10, 31, 90, 40), longest=100)
    assert quality.accuracy == 0.5
    assert quality.neighbour_accuracy == 0.75
    assert quality.coverage == 0.5
    assert quality.mean_error == (0 + 11 + 60 + 0) / 4
    assert quality.log_bias == pytest.approx((np.log(20 / 31) + np.log(1 / 3)) / 4)


def test_a_constant_is_the_median() -> None:
    predicted = learn("constant", Examples(("a", "b", "c"), tokens(1, 5, 100))).predict(["x", "y"])
    assert predicted.tokens.tolist() == [5, 5]


@pytest.mark.slow
def test_quantile_regression_beats_the_constant_and_its_intervals_hold() -> None:
    learnt, unseen = texts(400), texts(300, seed=1)
    errors = {}
    for method in ("constant", "quantile"):
        predicted = learn(method, learnt).predict(unseen.prompts)
        errors[method] = PredictionQuality.measured(predicted, unseen.lengths, longest=200)
    assert errors["quantile"].log_sd < 0.5 * errors["constant"].log_sd
    assert 0.82 < errors["quantile"].coverage < 0.98


def test_prompts_are_held_out_whole() -> None:
    examples = Examples(("a", "a", "b", "b", "c"), tokens(1, 2, 3, 4, 5))
    known, unseen = examples.split(0.34, seed=0)
    assert set(known.prompts).isdisjoint(unseen.prompts)
    assert len(known) + len(unseen) == 5


@pytest.mark.parametrize("method", [method for method in METHODS if method != "encoder"])
def test_a_predictor_survives_its_folder(method: str, tmp_path: Path) -> None:
    examples = texts(120)
    trained = TrainedPredictor.train(method, examples)
    trained.save(tmp_path / "predictor")
    again = TrainedPredictor.load(tmp_path / "predictor")
    before, after = (one.predictor.predict(examples.prompts) for one in (trained, again))
    assert before.tokens.tolist() == after.tokens.tolist()
    assert before.high.tolist() == after.high.tolist()
    assert again.quality == trained.quality
    assert again.predicted.tolist() == trained.predicted.tolist()


@pytest.mark.slow
def test_a_small_random_distilbert_takes_the_path_of_a_checkpoint(tmp_path: Path) -> None:
    examples = texts(128)
    save_small_distilbert(tmp_path / "checkpoint", examples.prompts, words=60)
    predictor = EncoderPredictor.learnt(
        examples, str(tmp_path / "checkpoint"), epochs=9, learning_rate=3e-3, buckets=4
    )
    labels = bucket_of(examples.lengths, predictor.longest, 4)
    right = predictor.probabilities(examples.prompts).argmax(axis=1) == labels
    commonest = np.bincount(labels).max() / len(labels)
    assert right.mean() > commonest + 0.1
    fields = predictor.save(tmp_path)
    again = EncoderPredictor.load(tmp_path, json.loads(json.dumps(fields)))
    assert np.allclose(again.probabilities(examples.prompts), predictor.probabilities(examples.prompts))
    refreshed = EncoderPredictor.learnt(texts(32, 1), str(tmp_path / "encoder"), epochs=1, buckets=4)
    assert refreshed.predict(["Write many words, please."]).tokens.shape == (1,)


@pytest.mark.slow
def test_an_encoder_is_trained_saved_and_loaded_like_the_others(tmp_path: Path) -> None:
    examples = texts(60)
    save_small_distilbert(tmp_path / "checkpoint", examples.prompts, words=60)
    trained = TrainedPredictor.train("encoder", examples, encoder=str(tmp_path / "checkpoint"))
    trained.save(tmp_path / "predictor")
    again = TrainedPredictor.load(tmp_path / "predictor")
    before, after = (one.predictor.predict(examples.prompts) for one in (trained, again))
    assert before.tokens.tolist() == after.tokens.tolist()


def test_the_same_prompts_are_held_out_when_there_are_more() -> None:
    few, many = texts(100), texts(400)
    apart = set(few.split(0.2, seed=3)[1].prompts)
    known, unseen = few.joined(many).split(0.2, seed=3)
    assert apart <= set(unseen.prompts)
    assert apart.isdisjoint(known.prompts)
    assert 0.1 < len(unseen) / 500 < 0.3


KILLED_WHILE_SAVING = """
import itertools, os, sys
from pathlib import Path

import numpy as np

from batchbound.data.predictor import Examples
from batchbound.executor.predictors.predictor import TrainedPredictor
from batchbound.executor.predictors.quantiles import QuantilePredictor

folder = Path(sys.argv[1])


def trained(count):
    return TrainedPredictor.train("constant", Examples(tuple(map(str, range(count))), np.full(count, 5)))


def save(predictor, step):
    if os.fork() == 0:
        steps = itertools.count()

        def watch(event, arguments):
            # Opening, making, linking, renaming and deleting say the path that they are about to touch.
            if any(str(argument).startswith(str(folder)) for argument in arguments) and next(steps) == step:
                os._exit(9)

        sys.addaudithook(watch)
        predictor.save(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.wait()[1])


old, new = trained(10), trained(20)
old.save(folder)
found = []
for step in itertools.count():
    status = save(new, step)
    left = TrainedPredictor.load(folder)
    assert len((folder / "errors.csv").read_text().splitlines()) == 1 + len(left.actual)
    found.append(len(left.actual))
    if status == 0:
        break
    assert status == 9
    save(old, -1)
print(found)
"""


def test_a_predictor_killed_while_it_is_saved_is_the_one_before_or_the_new_one_whole(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path / "p")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == sorted(found)
    before, after = found[0], found[-1]
    assert before < after
    assert set(found) == {before, after}
    assert found.count(before) > 5
    assert found.count(after) > 2
    assert len(list((tmp_path / "p").glob("version-*"))) == 1


def test_what_else_stands_in_the_folder_of_a_predictor_stays(tmp_path: Path) -> None:
    trained = TrainedPredictor.train("constant", texts(20))
    for _ in range(2):
        trained.save(tmp_path / "p")
        (tmp_path / "p" / "lengths.jsonl").write_text("mine")
    assert (tmp_path / "p" / "lengths.jsonl").read_text() == "mine"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no method"):
        learn("guess", texts(3))
    with pytest.raises(ValueError, match="no token"):
        Examples(("a",), tokens(0))
    with pytest.raises(InputError, match="fewer than two prompts"):
        TrainedPredictor.train("constant", Examples(("a",), tokens(1)))
    with pytest.raises(InputError, match=r"predictor\.json"):
        TrainedPredictor.load(tmp_path)


@pytest.fixture
def past(tmp_path: Path) -> tuple[str, str]:
    examples = texts(80)
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    with prompts.open("w") as asked, answers.open("w") as said:
        for i, (prompt, length) in enumerate(zip(examples.prompts, examples.lengths.tolist(), strict=True)):
            body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 100}
            line = {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            asked.write(json.dumps(line) + "\n")
            usage = {"prompt_tokens": 5, "completion_tokens": length, "total_tokens": 5 + length}
            response = {"status_code": 200, "body": {"usage": usage}}
            said.write(json.dumps({"custom_id": f"r{i}", "response": response, "error": None}) + "\n")
    return str(prompts), str(answers)


@pytest.mark.slow
def test_the_command_trains_evaluates_and_applies(
    past: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = str(tmp_path / "predictor"), str(tmp_path / "lengths.jsonl")
    assert main(["predict", "train", *past, "-o", folder]) == 0
    assert "held-out completions" in capsys.readouterr().out
    # A pair that is named again counts once.
    assert main(["predict", "eval", folder, *past, *past]) == 0
    assert "80 completions, held out if the predictor was not trained" in capsys.readouterr().out
    assert main(["predict", "apply", folder, past[0], "-o", output]) == 0
    lines = [json.loads(line) for line in Path(output).read_text().splitlines()]
    assert len(lines) == 80
    assert all(1 <= line["response"]["body"]["usage"]["completion_tokens"] <= 100 for line in lines)
    assert (tmp_path / "predictor" / "errors.csv").read_text().startswith("predicted,actual\n")
    plan = ["plan", past[0], "--lengths", f"completions:{output}", "--slots", "4"]
    assert main([*plan, "-o", str(tmp_path / "plan.json")]) == 0


def test_the_command_names_mistakes(
    past: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "train", past[0], "-o", str(tmp_path / "p")]) == 2
    assert "pairs" in capsys.readouterr().err
    assert main(["predict", "train", *past, "--method", "constant", "-o", str(tmp_path / "p")]) == 0
    assert main(["predict", "train", *past, "--method", "constant", "-o", str(tmp_path / "p")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["predict", "train", *past, "-o", past[0]]) == 2
    assert "prompts.jsonl: is a file" in capsys.readouterr().err
    assert main(["predict", "train", *past, "--encoder", "x", "-o", str(tmp_path / "q")]) == 2
    assert "--encoder has no effect with --method quantile" in capsys.readouterr().err
    for suffix in ("csv", "parquet"):
        out = str(tmp_path / f"lengths.{suffix}")
        assert main(["predict", "apply", str(tmp_path / "p"), past[0], "-o", out]) == 2
        assert f"not written as .{suffix}. Name a .jsonl" in capsys.readouterr().err


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a predictor that learnt from twelve completions."""
    folder = tmp_path_factory.mktemp("twelve") / "p"
    TrainedPredictor.train("quantile", texts(12)).save(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "p", symlinks=True))


@pytest.mark.parametrize("file", ["errors.csv", "model.skops", "predictor.json"])
@pytest.mark.parametrize("content", [b"", b"x\n", b"{}", b"\xff\x00"])
def test_a_damaged_folder_is_named(file: str, content: bytes, folder: Path) -> None:
    (folder / "current" / file).write_bytes(content)
    with pytest.raises(InputError, match=r"/p\b"):
        TrainedPredictor.load(folder)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, (f"open({str(self.target)!r}, 'w').close()",)


def planted(folder: Path, target: Path, *, within: bool) -> None:
    """Put a pickle that writes ``target`` in place of the models, or within their archive."""
    model = folder / "current" / "model.skops"
    if not within:
        model.write_bytes(pickle.dumps(Payload(target)))
        return
    with zipfile.ZipFile(model) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(parts["schema.json"])
    schema["content"] = {"__class__": "exec", "__module__": "builtins", "__loader__": "TypeNode", "__id__": 1}
    with zipfile.ZipFile(model, "w") as archive:
        for name, content in {**parts, "schema.json": json.dumps(schema).encode()}.items():
            archive.writestr(name, content)
        archive.writestr("payload.pkl", pickle.dumps(Payload(target)))


@pytest.mark.parametrize("within", [False, True])
def test_nothing_in_a_strangers_folder_is_run(within: bool, folder: Path, tmp_path: Path) -> None:
    planted(folder, tmp_path / "ran", within=within)
    with pytest.raises(InputError, match="is damaged"):
        TrainedPredictor.load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_planted_payload_would_run_if_it_were_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def sixty() -> TrainedPredictor:
    """A predictor that learnt from sixty completions, so that its trees part them."""
    return TrainedPredictor.train("quantile", texts(60))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("left", 10**6),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("right", 0), ("feature_idx", 99), ("is_categorical", 1))
        ),
    ],
)
def test_a_tree_that_points_outside_is_refused(
    field: str, value: int, sixty: TrainedPredictor, tmp_path: Path
) -> None:
    trained = copy.deepcopy(sixty)
    assert isinstance(trained.predictor, QuantilePredictor)
    for (tree,) in trained.predictor.quantiles[0]._predictors:
        tree.nodes[field][tree.nodes["is_leaf"] == 0] = value
    trained.save(tmp_path / "p")
    with pytest.raises(InputError, match="a tree"):
        TrainedPredictor.load(tmp_path / "p")


def test_a_version_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    TrainedPredictor.train("constant", texts(20)).save(tmp_path / "p")
    TrainedPredictor.train("constant", texts(20)).save(tmp_path / "q")
    (tmp_path / "q" / "current").unlink()
    (tmp_path / "q" / "current").symlink_to((tmp_path / "p" / "current").resolve())
    with pytest.raises(InputError, match="leads out of its folder"):
        TrainedPredictor.load(tmp_path / "q")
