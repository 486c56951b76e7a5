"""Every command and example of the README and the docs, executed as it is written.

Blocks that carry a file name (```yaml my_recipe.yaml) are written to that file; ```bash blocks are
run line by line, in order, with the quickstart and benchmarks at `--smoke` sizes; ```python blocks
without a name are run.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from fledge.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: ([\w./-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LONG = {"quickstart", "bench"}
"""A command with one of these words runs with `--smoke`."""


def blocks():
    for page in PAGES:
        for language, name, text in BLOCK.findall(page.read_text()):
            yield page.name, language, name, text


def run(line):
    """Run one command line of the docs in this process; returns its exit code."""
    if line.startswith("make "):
        return make_target(line)
    words = shlex.split(line)
    assert words[0] == "fledge", f"the docs show a command that is not tested: {line}"
    smoke = words[1] in ("train", "bench") and LONG & set(words)
    argv, sys.argv = sys.argv, [*words, *(["--smoke"] if smoke else [])]
    try:
        main()
        return 0
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv = argv


def make_target(line):
    """The command behind a make target; those that run the tests are only looked up."""
    target = shlex.split(line)[1]
    makefile = (ROOT / "Makefile").read_text()
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert rule, f"no such target: {line}"
    for recipe in rule.group(1).splitlines():
        command = recipe.strip().replace("$(BIN)/", "").replace("$(ARGS)", "").strip()
        if command.startswith("fledge "):
            return run(command)
    return 0


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder like a fresh checkout, where `runs/quickstart` means the smoke run of it."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs").mkdir()
    (folder / "runs" / "quickstart").symlink_to("quickstart-smoke")
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    os.chdir(before)


def test_every_example_runs(desk):
    ran = 0
    for page, language, name, text in blocks():
        if name:
            Path(name).write_text(text)
        elif language == "bash":
            for line in text.strip().splitlines():
                assert run(line) == 0, f"{page}: {line}"
                ran += 1
        elif language == "python":
            exec(compile(text, page, "exec"), {"__name__": "__main__"})
            ran += 1
    assert ran >= 20


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_documents_name_only_keys_that_exist():
    from fledge.config.load import walk_keys
    from fledge.config.schema import PreferConfig, SftConfig, TrainConfig

    schemas = (TrainConfig, SftConfig, PreferConfig)
    known = {key for schema in schemas for key, _ in walk_keys(schema)}
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for page in PAGES:
        for word in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:[=:][^`]*)?`", page.read_text()):
            if word.split(".")[0] in sections:
                assert word in known | sections, f"{page.name} speaks of {word}"


def test_the_page_of_settings_is_made_from_the_schema(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import settings

    assert settings.PAGE.read_text() == settings.page(), "run python scripts/settings.py"
    unexplained = [line for line in settings.page().splitlines() if line.endswith("|  |")]
    assert not unexplained
