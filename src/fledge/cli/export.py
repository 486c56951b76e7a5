"""`fledge export`: a run's newest checkpoint as a folder that others can load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from fledge.errors import ConfigError
from fledge.models.load import export
from fledge.orchestration import open_run
from fledge.orchestration.files import why


def export_run(run: Path, out: Path, *, adapter: bool) -> None:
    """All of it or nothing: it is written beside `out` and takes its name when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT: {out} already exists and is not an empty folder; name another")
    _, policy = open_run(run)
    if adapter and not policy.has_adapter:
        raise ConfigError(
            f"--adapter: {run} trained all weights (model.lora is not set), so it has no adapter; "
            "leave the option out"
        )
    partial = out.absolute().with_name(f".{out.absolute().name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        export(policy, partial, merge=not adapter)
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"OUT: cannot write {out}: {why(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
