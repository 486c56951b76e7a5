"""Runs the slow tests one by one and prints a table. Resumable: what passed on the same sources is
not run again.

python scripts/slow.py            all that has not passed yet
python scripts/slow.py resume     only tests whose name contains `resume`
python scripts/slow.py --again    everything, whatever passed before
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".slow" / "results.json"
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "slow"]
LIMIT = 3600.0
"""Seconds that one test may take."""


def sources() -> str:
    """A name for the code and the tests as they are now."""
    digest = hashlib.sha256()
    for folder in ("src", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".json"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def collect(words: list[str]) -> list[str]:
    # The configured options would ask for quick tests and for one line per file.
    command = [*PYTEST, "--collect-only", "-q", "tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    return [t for t in tests if all(word in t for word in words)]


def run(test: str, code: str) -> dict[str, Any]:
    log = ROOT / ".slow" / (test.replace("/", ".").replace("::", ".").replace(" ", "_") + ".log")
    began = time.monotonic()
    command = [*PYTEST, "-rA", test]
    with log.open("w") as file:
        try:
            finished = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, timeout=LIMIT, check=False
            )
            passed = finished.returncode == 0
        except subprocess.TimeoutExpired:
            passed = False
    figures = [line[2:] for line in log.read_text().splitlines() if line.startswith("| ")]
    return {
        "sources": code,
        "passed": passed,
        "seconds": round(time.monotonic() - began),
        "figures": figures[-1] if figures else "",
        "log": str(log.relative_to(ROOT)),
    }


def main(arguments: list[str]) -> int:
    words = [a for a in arguments if not a.startswith("--")]
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    code = sources()
    tests = collect(words)
    for number, test in enumerate(tests, 1):
        known = results.get(test, {})
        done = known.get("passed") and known.get("sources") == code
        if done and "--again" not in arguments:
            continue
        print(f"[{number}/{len(tests)}] {test}", flush=True)
        results[test] = run(test, code)
        RESULTS.write_text(json.dumps(results, indent=1))
    width = max((len(t) for t in tests), default=4)
    print(f"\n{'test':<{width}}  result  seconds  figures")
    for test in tests:
        found = results[test]
        verdict = "passed" if found["passed"] else "FAILED"
        line = f"{test:<{width}}  {verdict}  {found['seconds']:>7}  {found['figures']}"
        print(line.rstrip() if found["passed"] else f"{line.rstrip()}  see {found['log']}")
    return 0 if tests and all(results[t]["passed"] for t in tests) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
