"""`python -m fledge.envs.sandbox`: what holds on this machine; exit code 1 if not all."""

from __future__ import annotations

import asyncio
import sys

from fledge.envs.sandbox.attacks import probe


def main() -> int:
    report = asyncio.run(probe())
    print(report.table())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
