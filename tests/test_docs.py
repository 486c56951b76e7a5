"""Every command and example of the README and the docs, executed as it is written.

Blocks that carry a file name (```yaml my_recipe.yaml) are written to that file; ```bash blocks are
run line by line, in order, with the quickstart, benchmarks and comparisons at `--smoke` sizes;
```python blocks without a name are run. The settings that a page of an algorithm shows are those of
its preset.
"""

import importlib
import inspect
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from fledge.algorithms import ADVANTAGES, CORRECTIONS, KL, LOSSES, REDUCTIONS
from fledge.algorithms.preferences import PREFERENCES
from fledge.cli.main import main
from fledge.config import PreferConfig, SftConfig, TrainConfig, load_config
from fledge.config.presets import PRESETS
from fledge.config.schema import ShapingConfig
from fledge.envs import ENVIRONMENTS
from fledge.orchestration.advice import advice

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ROOT / "docs" / "algorithms"
ENVIRONMENT_PAGES = ROOT / "docs" / "environments"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ALGORITHMS.glob("*.md")),
    *sorted(ENVIRONMENT_PAGES.glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)(?: ([\w./-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LONG = {"quickstart", "bench"}
"""A command with one of these words runs with `--smoke`."""


def blocks(*pages):
    for page in pages or PAGES:
        for language, name, text in BLOCK.findall(page.read_text()):
            yield page.name, language, name, text


def script(name):
    """A module of scripts/."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def run(line):
    """Run one command line of the docs in this process; returns its exit code."""
    if line.startswith("make "):
        return make_target(line)
    words = shlex.split(line)
    if words[:2] == ["python", "scripts/compare.py"]:
        # The first page compares all of them; what is finished is not run again.
        return script("compare").main([*words[2:], "--smoke"])
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
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            file, _, heading = target.partition("#")
            other = page.parent / file if file else page
            assert other.exists(), f"{page.name} points to {target}"
            assert not heading or heading in headings(other), f"{page.name} points to {target}"


def headings(page):
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documents_name_only_keys_that_exist():
    from fledge.config.load import walk_keys

    schemas = (TrainConfig, SftConfig, PreferConfig)
    known = {key for schema in schemas for key, _ in walk_keys(schema)}
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for page in PAGES:
        for word in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:[=:][^`]*)?`", page.read_text()):
            if word.split(".")[0] in sections:
                assert word in known | sections, f"{page.name} speaks of {word}"


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS) - {"arithmetic", "reward"}))
def test_every_environment_has_a_page_with_a_recipe_that_resolves(name):
    page = ENVIRONMENT_PAGES / f"{name}.md"
    recipes = [yaml.safe_load(text) for _, kind, _, text in blocks(page) if kind == "yaml"]
    assert recipes and f"fledge env check {name}" in page.read_text()
    for recipe in recipes:
        assert load_config(TrainConfig, recipe, environ={}).config.env.name == name


def test_the_page_of_settings_is_made_from_the_schema():
    settings = script("settings")
    assert settings.PAGE.read_text() == settings.page(), "run python scripts/settings.py"
    unexplained = [line for line in settings.page().splitlines() if line.endswith("|  |")]
    assert not unexplained


# ---- the pages of algorithms

TASK = {"env": "arithmetic", "data": {"train": {"name": "arithmetic"}}}
PLUGINS = {"advantage": ADVANTAGES, "loss": LOSSES}


def page_of(name):
    return ALGORITHMS / script("compare").page_of(name)


def yaml_of(page):
    """The settings that a page shows: the one YAML block without a file name."""
    (found,) = [text for _, language, name, text in blocks(page) if language == "yaml" and not name]
    return yaml.safe_load(found)


def loaded(algorithm):
    return load_config(TrainConfig, {**TASK, "algorithm": algorithm}, environ={})


def spelled_out(algorithm):
    """The section with the arguments that its plug-ins have by default, so that a page may show
    them and must show them right.
    """
    values = loaded(algorithm).config.algorithm.model_dump(mode="json")
    for key, known in PLUGINS.items():
        values[key] = with_defaults(known, values[key])
    values["correction"] = [with_defaults(CORRECTIONS, c) for c in values["correction"]]
    return values


def with_defaults(known, plugin):
    parameters = inspect.signature(known[plugin["name"]]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | plugin


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_page_shows_the_settings_of_its_preset(name):
    shown = yaml_of(page_of(name))
    assert shown.keys() == {"algorithm"} and shown["algorithm"]["name"] == name
    given = {key: shown["algorithm"][key] for key in ("teacher",) if key in shown["algorithm"]}
    expected = spelled_out({"name": name, **given})
    assert spelled_out(shown["algorithm"]) == expected

    without_name = {k: v for k, v in shown["algorithm"].items() if k != "name"}
    assert spelled_out(without_name) == expected | {"name": "grpo"}, "something is left to the name"
    inert = [text for text in advice(loaded(shown["algorithm"]), 0) if "no effect" in text]
    assert not inert


@pytest.mark.parametrize("name", [*PRESETS, "sft", "dpo"])
def test_a_page_has_everything_that_belongs_there(name):
    page = page_of(name)
    text, picture = page.read_text(), f"{page.stem}.svg"
    assert "$$" in text and "**When to use it.**" in text
    assert f"]({picture})" in text and f"```bash\npython scripts/compare.py {name}\n```" in text
    assert page.with_suffix(".svg").exists(), f"no {picture}; run python scripts/compare.py"


def test_every_page_is_of_an_algorithm_and_linked():
    found = {page.name for page in ALGORITHMS.glob("*.md")} - {"README.md", "parts.md"}
    assert found == {page_of(name).name for name in [*PRESETS, "sft", "dpo"]}


def test_recipes_of_supervised_pages_and_of_parts_are_valid():
    load_config(SftConfig, yaml_of(page_of("sft")), environ={})
    dpo = yaml_of(page_of("dpo"))
    load_config(PreferConfig, dpo, environ={})
    assert dpo["loss"] == with_defaults(PREFERENCES, {"name": "dpo", "nll": 1.0})
    for name, recipe in script("compare").RECIPES.items():
        shown = yaml_of(page_of(name))
        assert shown["optim"] == recipe["optim"]
        assert shown["data"]["train"] in (recipe["train"], recipe["train"]["name"])
        assert shown.get("loss", {}).items() >= recipe.get("loss", {}).items()
    for _, language, name, text in blocks(ALGORITHMS / "parts.md"):
        if language == "yaml" and not name:
            load_config(TrainConfig, {**TASK, **yaml.safe_load(text)}, environ={})


@pytest.mark.parametrize(
    "names", [ADVANTAGES, LOSSES, CORRECTIONS, KL, REDUCTIONS, ShapingConfig.model_fields]
)
def test_every_built_in_part_is_explained(names):
    pages = [page for page in ALGORITHMS.glob("*.md") if page.name != "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    missing = [name for name in names if not re.search(rf"`{re.escape(name)}[`:=]", text)]
    assert not missing


def test_the_overview_names_every_built_in_part():
    text = (ALGORITHMS / "README.md").read_text()
    for names in (ADVANTAGES, LOSSES, CORRECTIONS, KL, REDUCTIONS):
        assert not [name for name in names if f"`{name}`" not in text]
