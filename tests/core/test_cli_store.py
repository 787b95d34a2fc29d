"""`draftsmith store`: a store by its folder, or by its run's config and overrides."""

import pytest

from draftsmith.core.run import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("command", ["verify", "stats", "repair"])
def test_a_store_is_found_by_folder_and_by_config(run_cli, refused, config_file, synthetic_run, command):
    run, file = RunFolder.of(synthetic_run), config_file(synthetic_run)
    run.root.rename(run.root.with_name("other"))
    for given in (("--config", file, "run.name=other"), (run.root.with_name("other"),)):
        code, out, error = run_cli("store", command, *given)
        assert code == 0 and str(run.root.with_name("other")) in out, error
    message = refused("store", command, "--config", file, "run.name=none")
    assert f"{run.root.with_name('none')}/hidden_states: no such folder" in message
    assert f"`draftsmith store {command} runs/quickstart`" in message


@pytest.mark.parametrize("command", ["verify", "stats", "repair"])
def test_what_names_no_store_is_refused_with_the_command_itself(refused, config_file, synthetic_run, command):
    example, file = f"`draftsmith store {command} runs/quickstart`", config_file(synthetic_run)
    message = refused("store", command)
    assert "neither a folder nor --config is given" in message and example in message
    message = refused("store", command, "run.name=none")
    assert "`run.name=none` is an override" in message and example in message
    assert "2 folders are given: a, b" in refused("store", command, "a", "b")
    assert "runs/x is a folder beside --config" in refused("store", command, "--config", file, "runs/x")
    assert "unknown key `run.nam`" in refused("store", command, "--config", file, "run.nam=x")
