"""`jspec export` from the command line."""

import pytest
from tiny_experts import DEEPSEEK, tiny_tensors, write_checkpoint


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("m"), DEEPSEEK, tiny_tensors(DEEPSEEK)))


def test_modules_out_and_back(jspec_run, deepseek, tmp_path):
    alone, whole = str(tmp_path / "alone"), str(tmp_path / "whole")
    said = jspec_run("export", "mtp", "--target", deepseek, "--to", "nextn", "--out", alone)
    assert said == f"{alone}: nextn, from mtp\n"
    said = jspec_run("export", alone, "--target", deepseek, "--to", "mtp", "--out", whole)
    assert said == f"{whole}: mtp, from nextn\n"


@pytest.mark.parametrize(
    ("source", "to", "says"),
    [
        (
            "mtp",
            "medusa",
            "a set of prediction modules cannot be written as 'medusa'; expected mtp",
        ),
        ("{target}", "mtp", "nor a folder of prediction modules; those in a model's own"),
        ("./none", "mtp", "./none"),
        ("mtp", "gguf", "--to"),
    ],
)
def test_wrong_use(jspec_fails, deepseek, tmp_path, source, to, says):
    source = source.format(target=deepseek)
    out = ("--target", deepseek, "--to", to, "--out", str(tmp_path / "new"))
    assert says in jspec_fails("export", source, *out)
    assert not (tmp_path / "new").exists()


def test_target_without_modules(jspec_fails, model, tmp_path):
    out = ("--target", model, "--to", "mtp", "--out", str(tmp_path / "new"))
    assert "prediction modules of 'llama' targets are not supported" in jspec_fails(
        "export", "mtp", *out
    )
