"""The shape of the package: who imports whom, what loads when, how long things are, which names and
keys exist.
"""

import ast
import subprocess
import sys
from pathlib import Path

import fledge
from fledge.config.load import walk_keys
from fledge.config.schema import PreferConfig, SftConfig, TrainConfig

SOURCE = Path(fledge.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = [
    {"types", "messages", "interfaces", "config", "errors", "metrics", "plugins", "log"},
    {"data", "envs", "models", "algorithms"},
    {"inference", "weights", "trainer"},
    {"rollout"},
    {"orchestration"},
    {"cli", "recipes"},
]
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}

HEAVY = {
    "torch": {
        "algorithms",
        "data",
        "models",
        "inference",
        "weights",
        "trainer",
        "orchestration",
        "cli",
    },
    "transformers": {"models", "cli"},
    "peft": {"models"},
    "safetensors": {"models", "trainer", "orchestration", "cli"},
    "datasets": {"data"},
    "pyarrow": {"data"},
    "tensorboard": {"orchestration"},
    "wandb": {"orchestration"},
    "mlflow": {"orchestration"},
    "trl": {"cli"},
}
"""Which packages may import what is slow to load; everybody else meets it through them."""

KEYS = {
    "run_dir", "seed", "steps", "threads", "console",
    "model.path", "model.random_init", "model.overrides", "model.dtype", "model.device",
    "model.lora.rank", "model.lora.alpha", "model.lora.targets", "model.lora.rslora",
    "model.lora.dora", "model.lora.plus_ratio", "model.gradient_checkpointing",
    "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.weight_decay", "optim.beta1",
    "optim.beta2", "optim.clip_norm", "optim.micro_tokens",
    "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_best",
    "tracking.to", "tracking.project",
    "env", "data.train", "data.eval", "data.eval_size", "data.shuffle", "data.max_prompt_tokens",
    "rollout.group_size", "rollout.groups_per_step", "rollout.max_new_tokens",
    "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.stop",
    "rollout.reward_weights", "rollout.timeout", "rollout.retries", "rollout.max_turns",
    "rollout.max_episode_tokens", "rollout.max_seconds", "rollout.overflow",
    "rollout.min_group_size", "rollout.mask",
    "algorithm.name", "algorithm.advantage", "algorithm.loss", "algorithm.reduction",
    "algorithm.norm_length", "algorithm.old", "algorithm.correction", "algorithm.entropy_coef",
    "algorithm.token_reward", "algorithm.teacher", "algorithm.epochs", "algorithm.minibatches",
    "algorithm.kl.coef", "algorithm.kl.estimator", "algorithm.kl.placement", "algorithm.kl.target",
    "algorithm.kl.horizon", "algorithm.kl.ref_every",
    "algorithm.shaping.dynamic_sampling", "algorithm.shaping.max_rounds",
    "algorithm.shaping.mask_zero_variance", "algorithm.shaping.mask_truncated",
    "algorithm.shaping.zero_unless_stopped", "algorithm.shaping.overlong_buffer",
    "algorithm.shaping.overlong_penalty",
    "algorithm.critic.model", "algorithm.critic.path", "algorithm.critic.lr",
    "algorithm.critic.coef", "algorithm.critic.clip", "algorithm.critic.warmup_steps",
    "reward_model.path", "reward_model.weight",
    "engine.cache_mb", "metrics",
    "eval.every", "eval.samples", "eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p",
}  # fmt: skip
SFT_DATA = {"train", "eval_size", "batch_size", "max_tokens"}

PUBLIC = {
    "Environment", "FledgeError", "Message", "PreferConfig", "SftConfig", "Step", "Task",
    "TrainConfig", "__version__", "assistant", "check_env", "evaluate", "load_config", "prefer",
    "sft", "system", "train", "user",
}  # fmt: skip


def package_of(path):
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


def imports_of(path):
    """Every module that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "fledge":
                yield from (f"fledge.{alias.name}" for alias in node.names if alias.name in LAYER)
            else:
                yield node.module


def test_every_package_has_a_layer():
    found = {package_of(path) for path in FILES} - {"__init__"}
    assert found == set(LAYER)


def test_a_package_imports_itself_and_lower_layers_only():
    wrong = []
    for path in FILES:
        own = package_of(path)
        if own == "__init__":
            continue
        for module in imports_of(path):
            if module.startswith("fledge."):
                other = module.split(".")[1]
                lower = LAYER[other] < LAYER[own] or (LAYER[own] == LAYER[other] == 0)
                if other != own and not lower:
                    wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong


def test_heavy_dependencies_are_imported_where_they_belong():
    wrong = []
    for path in FILES:
        for module in imports_of(path):
            allowed = HEAVY.get(module.split(".")[0])
            if allowed is not None and package_of(path) not in allowed:
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong


def test_nothing_heavy_loads_with_the_package_or_the_help():
    code = (
        "import sys, contextlib, io\n"
        "import fledge, fledge.cli.main\n"
        "sys.argv = ['fledge', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    fledge.cli.main.main()\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "fledge" in loaded
    assert not loaded & (set(HEAVY) | {"numpy", "tokenizers", "huggingface_hub"})


def test_scheduler_and_pages_know_no_torch():
    for name in ("scheduler", "blocks"):
        modules = set(imports_of(SOURCE / "inference" / f"{name}.py"))
        assert not any(module.startswith(("torch", "fledge.models")) for module in modules)


def test_environments_know_no_tokens_and_no_tensors():
    for path in (SOURCE / "envs").rglob("*.py"):
        heavy = [m for m in imports_of(path) if m.split(".")[0] in HEAVY]
        assert not heavy, f"{path.name} imports {heavy}"


def test_files_and_functions_fit_on_a_screen_or_a_few():
    long = []
    for path in FILES:
        text = path.read_text()
        if len(text.splitlines()) > 600:
            long.append(f"{path.relative_to(SOURCE)} has {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 80:
                    long.append(f"{path.relative_to(SOURCE)}:{node.name} has {lines} lines")
    assert not long


def test_the_package_stays_small():
    assert sum(len(path.read_text().splitlines()) for path in FILES) < 25_000


def test_every_module_says_what_it_is():
    silent = [
        str(p.relative_to(SOURCE)) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent


def test_configuration_keys_are_these():
    warm_start = {f"warm_start.{k}" for k in SFT_DATA | {"steps"}}
    warm_start |= {f"warm_start.{k}" for k in KEYS if k.startswith("optim.")}
    assert {key for key, _ in walk_keys(TrainConfig)} == KEYS | warm_start
    common = {k for k in KEYS if k.split(".")[0] in CommonSections}
    supervised = common | {f"data.{k}" for k in SFT_DATA}
    assert {key for key, _ in walk_keys(SftConfig)} == supervised
    assert {key for key, _ in walk_keys(PreferConfig)} == supervised | {"loss"}


CommonSections = {
    "run_dir", "seed", "steps", "threads", "console", "model", "optim", "checkpoint", "tracking",
}  # fmt: skip


def test_public_names_are_these():
    assert set(fledge.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(fledge, name) is not None
