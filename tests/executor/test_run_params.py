"""Parameters of a run: defaults, and files that change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchbound import ModelOptions, RunOptions, RunParams, ServerOptions
from batchbound.data.files.disk import InputError
from batchbound.executor.jobs.params import Patience


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    text = "[search]\nshare = 0.5\n[run]\njournal_sync_seconds = 10\n[run.patience]\nattempts = 3\n"
    found = RunParams.from_file(written(tmp_path / "params.toml", text))
    assert found == RunParams(journal_sync_seconds=10, patience=Patience(attempts=3))
    assert RunParams.from_file(written(tmp_path / "empty.toml", "")) == RunParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nsync = 1\n", "field 'run.sync': the field is unknown. Choose from journal_sync_seconds"),
        ("[run.patience]\ntries = 1\n", "field 'run.patience.tries': the field is unknown"),
        ("[run]\nmetrics_seconds = 0\n", "metrics_seconds is 0.0; it must be a number above 0"),
        ("[run]\nqueue_iterations = 1.5\n", "field 'run.queue_iterations': 1.5 is not a whole number"),
        ("[run.patience]\nattempts = 0\n", "attempts is 0; it must be a whole number, at least 1"),
        ("[runs]\n", "has 'runs'"),
        ("run = 3\n", "not an object"),
        ("[run\n", "is not a TOML file"),
    ],
)
def test_a_wrong_parameter_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        RunParams.from_file(written(tmp_path / "params.toml", text))
    assert message in str(caught.value)


def test_options_take_parameters_or_their_file(tmp_path: Path) -> None:
    path = written(tmp_path / "params.toml", "[run]\nrequest_seconds = 7\n[run.patience]\nattempts = 3\n")
    assert RunOptions(params=path).tuned.request_seconds == 7
    assert [*RunOptions(params=path).files()] == [path]
    servers = ServerOptions(("http://127.0.0.1:9",), params=path, outage=5.0)
    assert servers.tuned == RunParams(request_seconds=7, patience=Patience(attempts=3, outage_seconds=5.0))
    assert [*servers.files()] == [path]
    assert ServerOptions(("http://127.0.0.1:9",), attempts=2).tuned.patience.attempts == 2


def test_the_room_of_a_run_hides_no_public_name() -> None:
    import batchbound
    import batchbound.run_job.run

    assert callable(batchbound.run)
    assert ModelOptions("tiny:llama").model == "tiny:llama"
